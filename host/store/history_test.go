package store

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging"
)

var (
	historySeed = flag.Uint64("history.seed", 0, "replay the random history of this seed only")
	historyTime = flag.Duration("history.time", 0, "keep on with fresh seeds for so long")
)

// TestRandomHistories drives a store with random operations beside a model that knows which bytes may be served.
func TestRandomHistories(t *testing.T) {
	if *historySeed != 0 {
		runHistory(t, *historySeed, *historySeed%2 == 0)
		return
	}
	seeds := uint64(8)
	if testing.Short() {
		seeds = 2
	}
	for seed := uint64(1); seed <= seeds; seed++ {
		runHistory(t, seed, seed%2 == 0)
	}
	for end, seed := time.Now().Add(*historyTime), uint64(time.Now().UnixNano()); *historyTime > 0 && time.Now().Before(end); seed++ {
		runHistory(t, seed, seed%2 == 0)
	}
}

// historyFaults strike a few in a hundred calls of each kind.
const historyFaults = `
	write ** 2%% seed %[1]d: enospc
	write ** 1%% seed %[2]d: short
	publish ** 3%% seed %[3]d: eio
	publish ** 3%% seed %[4]d: eio after
	remove ** 2%% seed %[5]d: eio
	remove ** 2%% seed %[6]d: eio after
	open **_r* 1%% seed %[7]d: emfile
	open **.tmp 1%% seed %[8]d: eio after
	sync ** 3%% seed %[9]d: eio
	syncdir ** 2%% seed %[10]d: eio
	close ** 1%% seed %[11]d: eio after
	stat **_r* 1%% seed %[12]d: estale
`

type history struct {
	*fixture
	rng    *rand.Rand
	faulty *staging.FaultFS
	rules  []staging.Rule
	stored map[uint64]uint64 // ranks that were published at some time
	spoilt map[uint64]bool   // some file was damaged or removed behind the store's back
	held   []*Lease
	puts   []*Put
}

func runHistory(t *testing.T, seed uint64, faults bool) {
	t.Run(fmt.Sprintf("seed=%d/faults=%t", seed, faults), func(t *testing.T) {
		h := &history{rng: rand.New(rand.NewPCG(seed, 1)), stored: map[uint64]uint64{}, spoilt: map[uint64]bool{}}
		h.faulty = staging.Faulty(staging.OS())
		if faults {
			var seeds []any
			for range 12 {
				seeds = append(seeds, h.rng.Uint64N(1<<32))
			}
			h.rules = staging.MustRules(fmt.Sprintf(historyFaults, seeds...))
		}
		h.fixture = newFixture(t, t.TempDir(), 10, 2, func(c *Config) {
			c.FS = h.faulty
			c.Seed = seed
			c.Durability = []Durability{None, Strict}[h.rng.IntN(2)]
			c.QuarantineFiles = 3
			c.UpkeepEvery = time.Hour // steps do its work, so that a seed replays
			c.Roots[0].Capacity += 7 * Page
		})
		h.faulty.Set(h.rules...)
		for step := range 300 {
			what := h.step()
			if err := h.invariants(); err != nil {
				t.Fatalf("seed %d, step %d (%s): %v", seed, step, what, err)
			}
		}
		h.faulty.Set()
		h.letGo()
		if err := h.store.roots[0].idle(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		h.reopen()
		if err := h.store.roots[0].idle(); err != nil {
			t.Fatalf("seed %d, reopened: %v", seed, err)
		}
		h.checkUsed()
	})
}

func (h *history) key() uint64 { return h.rng.Uint64N(24) }

func (h *history) step() string {
	if r := h.store.roots[0]; !r.takes() && h.rng.IntN(8) == 0 {
		_ = r.comeBack(context.Background(), r.state())
		return "probe"
	}
	switch n := h.rng.IntN(100); {
	case n < 40:
		return h.store1()
	case n < 70:
		return h.load()
	case n < 76:
		return h.begin()
	case n < 82:
		return h.finish()
	case n < 90:
		return h.release()
	case n < 94:
		return h.spoil()
	case n < 97:
		h.store.EndRequest(1)
		return "end request"
	default:
		return h.reopen()
	}
}

// acceptable are the errors that a put may end in.
func acceptable(err error) bool {
	return err == nil || errors.Is(err, ErrResident) || errors.Is(err, ErrNoSpace) || errors.Is(err, staging.ErrInjected) ||
		errors.Is(err, ErrGone) || errors.Is(err, ErrRootOut)
}

func (h *history) must(err error, what string, n uint64) {
	h.Helper()
	if !acceptable(err) {
		h.Fatalf("%s %d: %v", what, n, err)
	}
}

func (h *history) store1() string {
	n := h.key()
	for rank := range uint32(2) {
		err := h.put(n, rank)
		h.must(err, "put", n)
		if err == nil {
			h.stored[n] |= 1 << rank
		}
	}
	return "put"
}

func (h *history) begin() string {
	n, rank := h.key(), uint32(h.rng.IntN(2))
	p, err := h.store.Put(context.Background(), h.request(n, n-1, rank))
	h.must(err, "begin", n)
	if err == nil {
		h.puts = append(h.puts, p)
	}
	return "begin"
}

func (h *history) finish() string {
	if len(h.puts) == 0 {
		return "nothing to finish"
	}
	i := h.rng.IntN(len(h.puts))
	p := h.puts[i]
	h.puts = append(h.puts[:i], h.puts[i+1:]...)
	if h.rng.IntN(3) == 0 {
		if h.rng.IntN(2) == 0 {
			_ = write(p)
		}
		p.Abort(errors.New("history"))
		return "abort"
	}
	err := write(p)
	if err != nil {
		h.must(err, "write", 0)
		p.Abort(err)
		return "failed write"
	}
	err = p.Publish(context.Background())
	h.must(err, "publish", uint64(p.depth))
	if err == nil {
		h.stored[uint64(p.depth)] |= 1 << p.rank
	}
	return "publish"
}

func (h *history) load() string {
	from := h.key()
	var list []uint64
	for n := from; n < from+4; n++ {
		list = append(list, n)
	}
	l := h.lookup(list...)
	for i := range l.Hits() {
		n := list[i]
		if h.stored[n] != 3 {
			h.Fatalf("key %d is a hit; pieces %b were published", n, h.stored[n])
		}
		rank := uint32(h.rng.IntN(2))
		data, err := read(l, i, rank)
		switch {
		case err == nil && !bytes.Equal(data, payload(h.space.Plan(0), testKey(n), rank)):
			h.Fatalf("key %d rank %d: other bytes than were stored", n, rank)
		case err != nil && !h.spoilt[n] && !errors.Is(err, staging.ErrInjected) && h.rules == nil:
			h.Fatalf("key %d rank %d: %v", n, rank, err)
		case isDamage(err) || errors.Is(err, ErrGone):
			if h.has(n) {
				h.Fatalf("key %d is a hit after %v", n, err)
			}
			delete(h.spoilt, n)
		}
	}
	if h.rng.IntN(3) == 0 {
		h.held = append(h.held, l)
		return "load and hold"
	}
	l.Release()
	return "load"
}

func (h *history) release() string {
	if len(h.held) > 0 {
		i := h.rng.IntN(len(h.held))
		h.held[i].Release()
		h.held = append(h.held[:i], h.held[i+1:]...)
	}
	return "release"
}

// spoil damages or removes a file behind the store's back.
func (h *history) spoil() string {
	n, rank := h.key(), uint32(h.rng.IntN(2))
	name := h.pieceFile(n, rank)
	if _, err := os.Stat(name); err != nil {
		return "nothing to spoil"
	}
	h.spoilt[n] = true
	var err error
	switch h.rng.IntN(4) {
	case 0:
		err = os.Remove(name)
	case 1:
		err = os.Truncate(name, int64(h.rng.IntN(pieceBytes)))
	default:
		var f *os.File
		if f, err = os.OpenFile(name, os.O_WRONLY, 0); err == nil {
			b := []byte{byte(h.rng.Uint32()), byte(h.rng.Uint32()), byte(h.rng.Uint32()), byte(h.rng.Uint32())}
			_, err = f.WriteAt(b, int64(h.rng.IntN(2*Page+8000-4)))
			f.Close()
		}
	}
	if err != nil {
		h.Fatal(err)
	}
	return "spoil"
}

func (h *history) letGo() {
	for _, l := range h.held {
		l.Release()
	}
	for _, p := range h.puts {
		p.Abort(errors.New("history"))
	}
	h.held, h.puts = nil, nil
}

// reopen closes and opens the store: what was a hit is one again, unless its files were spoilt. (With faults, files that
// would not be unlinked come back and may push others out.)
func (h *history) reopen() string {
	h.faulty.Set()
	h.letGo()
	h.backIn()
	before := map[uint64]bool{}
	for n := range uint64(24) {
		before[n] = h.has(n)
	}
	h.restart()
	for n := range uint64(24) {
		if before[n] && !h.spoilt[n] && h.rules == nil && !h.has(n) {
			h.Fatalf("key %d was a hit before the restart", n)
		}
	}
	h.faulty.Set(h.rules...)
	return "reopen"
}

func (h *history) invariants() error {
	r := h.store.roots[0]
	if err := r.check(); err != nil {
		return err
	}
	st := h.store.Stats().Roots[0]
	disk, temporaries := usage(h, h.cfg.Roots[0].Path)
	open := 0
	for _, p := range h.puts {
		if p.temp != "" {
			open++
		}
	}
	switch {
	case disk > st.Capacity:
		return fmt.Errorf("%d bytes on disk, of %d", disk, st.Capacity)
	case st.Used > st.Capacity && h.rules == nil:
		return fmt.Errorf("%d bytes used of %d", st.Used, st.Capacity)
	case disk > st.Used:
		return fmt.Errorf("%d bytes on disk, the account says %d", disk, st.Used)
	case h.rules == nil && temporaries != open:
		return fmt.Errorf("%d temporaries, %d puts have one", temporaries, open)
	}
	return nil
}
