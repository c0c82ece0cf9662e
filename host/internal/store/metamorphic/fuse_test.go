package metamorphic

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/fusefs"
)

// lesser are file systems that do less than others, and still what they must.
var lesser = []string{
	"read ** 10% seed 1: short\nwrite ** 10% seed 2: short",
	"open,read,write,rename,publish,link,remove,mkdir,sync,allocate ** 5% seed 3: eintr",
	"direct **: einval\nallocate **: eopnotsupp",
	"publish **: einval", // renameat2 takes no flags; links are there
	"stat,readdir ** 2% seed 4: delay 2ms",
}

// TestHistoriesOnFUSE runs histories whose roots are real directories, on a file system that does less than others below the
// kernel. Everything must hold as on any other, with faults of the histories' own on top.
func TestHistoriesOnFUSE(t *testing.T) {
	testenv.Need(t, testenv.FUSE)
	kinds := slices.DeleteFunc(Kinds(), func(k Kind) bool { return k.Name == "memory" })
	tally := testenv.NewTally(t, "fuse-histories")
	m, err := fusefs.New(t.TempDir(), t.TempDir())
	must(t, err)
	defer func() {
		if err := m.Unmount(); err != nil {
			t.Error(err)
		}
	}()
	seeds := uint64(len(lesser)) // the short run: one history on each
	start, first, length := time.Now(), uint64(0), min(*ops, 60)
	if *histories > 0 {
		first, length = uint64(start.UnixNano()), *ops
	}
	var injected uint64
	for i := uint64(0); (i < seeds || time.Since(start) < *histories) && !t.Failed(); i++ {
		h := Generate(cmp.Or(*seed, first+i*7+1), length)
		if !slices.ContainsFunc(kinds, func(k Kind) bool { return k.Name == h.Kind.Name }) {
			continue
		}
		rules := lesser[i%uint64(len(lesser))]
		must(t, m.Set(rules))
		res, err := runIn(t, h, m.Dir)
		tally.Add(int64(len(res.Results)), res.Killed, 1)
		n, ierr := m.Injected()
		injected += n
		if err != nil || ierr != nil {
			t.Errorf("seed %d, kind %s, on a file system with %q: %v, %v", h.Seed, h.Kind.Name, strings.ReplaceAll(rules, "\n", "; "), err, ierr)
		}
	}
	if injected == 0 {
		t.Error("the file system did all that others do")
	}
}
