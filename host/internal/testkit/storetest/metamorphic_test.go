package storetest

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/plugins/dist"
)

var (
	seed      = flag.Uint64("seed", 0, "run the history of this seed only")
	kind      = flag.String("kind", "", "run histories of this kind only")
	ops       = flag.Int("ops", defaultOps, "operations of a history")
	histories = flag.Duration("time", 0, "continue with fresh seeds for so long")
)

// policies opens the first-party modules that histories use, compiled once. They stay open, so that all stores of all
// histories share their machine code: to load it again costs as much as ten operations.
var policies = sync.OnceValues(func() (opt policy.Options, err error) {
	names := []string{"lru", "fifo", "fanout"}
	if opt.Dir, err = policytest.Build(names...); err == nil {
		opt.Cache, err = policytest.OpenCache()
	} else if len(dist.Names()) > 0 { // without a toolchain the modules that the test binary was built with do
		opt.Cache, err = sandbox.OpenCache(filepath.Join(os.TempDir(), "kvhost-history-policies"))
	}
	for _, name := range names {
		if err == nil {
			_, err = policy.Open(context.Background(), name, opt)
		}
	}
	return opt, err
})

// TestHistories runs a history of each kind of several clients or hosts, and fresh seeds of all kinds for as long as -time says. A
// history that fails is written to the temporary directory; its seed and kind make it again.
func TestHistories(t *testing.T) {
	if *seed != 0 {
		h := generate(*seed)
		if *kind != "" { // the kinds may have become more since the seed failed
			h = generateKind(t, *kind, *seed)
		}
		run(t, h)
		return
	}
	p := &player{T: t, tally: testenv.NewTally(t, cmp.Or(*kind, "histories"))}
	for seed := uint64(1); seed <= uint64(len(Kinds())); seed++ {
		if h := generate(seed); *histories > 0 || h.Kind.concurrent() {
			p.play(h)
		}
	}
	seed := uint64(time.Now().UnixNano())
	for end := time.Now().Add(*histories); *histories > 0 && time.Now().Before(end) && !t.Failed(); seed++ {
		p.play(generate(seed))
	}
	p.end()
}

// TestHistoriesOfOneClient runs a history of each other kind, some more with power losses. The race detector finds nothing in them that it
// does not find in those of many clients.
func TestHistoriesOfOneClient(t *testing.T) {
	testenv.Slow(t)
	if *seed != 0 || *histories > 0 {
		return // TestHistories runs them
	}
	p := &player{T: t, tally: testenv.NewTally(t, "histories of one client")}
	kinds := uint64(len(Kinds()))
	for seed := uint64(1); seed <= kinds; seed++ {
		if h := generate(seed); !h.Kind.concurrent() {
			p.play(h)
		}
	}
	for i := range uint64(9) { // they are short
		p.play(generateKind(t, "power-losses", kinds+1+i))
	}
	p.end()
}

// player plays histories, and counts what comes of them.
type player struct {
	*testing.T
	tally *testenv.Tally
	count int
	all   Result
}

func (p *player) play(h *History) {
	if *kind != "" && h.Kind.Name != *kind {
		return
	}
	p.count++
	res := run(p.T, h)
	if res == nil { // it did not begin
		return
	}
	p.tally.Add(int64(len(res.Results)), res.Killed, 1)
	p.all.Stored += res.Stored
	p.all.Loads += res.Loads
	p.all.Hits += res.Hits
}

func (p *player) end() {
	p.Helper()
	p.Logf("%d histories: %d pieces stored, %d loads, %d of them returned bytes", p.count, p.all.Stored, p.all.Loads, p.all.Hits)
	if p.count > 0 && (p.all.Stored == 0 || p.all.Loads == 0 || p.all.Hits == 0) {
		p.Error("the histories are about nothing")
	}
}

func generate(seed uint64) *History { return Generate(seed, *ops) }

// generateKind makes the history of a seed, of the kind of this name.
func generateKind(t *testing.T, name string, seed uint64) *History {
	k, err := kindNamed(name)
	must(t, err)
	return GenerateKind(k, seed, *ops)
}

func run(t *testing.T, h *History) (res *Result) {
	t.Run(fmt.Sprintf("seed=%d/%s", h.Seed, h.Kind.Name), func(t *testing.T) {
		file := filepath.Join(os.TempDir(), fmt.Sprintf("kvhost-history-%d-%d.ops", h.Seed, os.Getpid()))
		save(t, file, h.String()) // a panic elsewhere, or a hang, leaves it there
		var err error
		if res, err = runOnce(t, h); err == nil {
			must(t, os.Remove(file))
			return
		}
		save(t, file, res.Text())
		t.Errorf("history of seed %d, kind %s, %d operations: %v", h.Seed, h.Kind.Name, len(h.Ops), err)
		t.Logf("the history with its results is in %s\nagain: go test ./host/internal/testkit/storetest -run TestHistories "+
			"-kind %s -seed %d -ops %d", file, h.Kind.Name, h.Seed, *ops)
	})
	return res
}

// runOnce runs a history in a fresh directory.
func runOnce(t *testing.T, h *History) (*Result, error) {
	return runIn(t, h, "")
}

// runIn is runOnce with the directory below another.
func runIn(t *testing.T, h *History, above string) (*Result, error) {
	opt, err := policies()
	must(t, err)
	dir, err := os.MkdirTemp(above, "kvhost-history")
	must(t, err)
	defer os.RemoveAll(dir)
	return Run(h, Options{Dir: dir, Policies: opt, Patience: testenv.Context(t)})
}

func save(t *testing.T, file, text string) {
	t.Helper()
	must(t, os.WriteFile(file, []byte(text), 0o600))
}

// must ends a test that cannot go on without what failed.
func must(t testing.TB, err error) {
	t.Helper()
	testenv.OK(t, err)
}
