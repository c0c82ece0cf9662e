package transfer

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/staging"
)

// SetWriteQueue changes [Config].WriteQueue for stores that come from now on.
func (e *Engine) SetWriteQueue(d time.Duration) { e.cfg.WriteQueue = d }

// Fragment takes all pages of a file system, and gives back runs of random lengths, one page of so many.
func Fragment(t testing.TB, mem *memfs.FS, of int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 1))
	testenv.OK(t, mem.Mkdir("/taken", 0o700))
	var names []string
	for err := error(nil); err == nil; {
		var f staging.File
		name := fmt.Sprint("/taken/", len(names))
		if f, err = mem.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600); err == nil {
			names = append(names, name)
			_, err = staging.MemoryOf(f, int64(1+rng.IntN(20))*4096)
			f.Close()
		}
	}
	for i, name := range names {
		if i%of == 0 {
			testenv.OK(t, mem.Remove(name))
		}
	}
}
