package store

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

var (
	historySeed  = flag.Uint64("history.seed", 0, "replay the random history of this seed only")
	historyTime  = flag.Duration("history.time", 0, "keep on with fresh seeds for so long")
	historyTrace = flag.Int("history.trace", 60, "operations that are shown when one fails")
)

// A history drives stores with random operations beside a model that knows which bytes were offered under which namespace,
// key and rank. What must hold at every step: a load gives bytes that were offered under its names or fails; what failed is
// a miss from then on; no root, however many hosts use it, takes more than its capacity; nothing is left over at the end.
//
// All is drawn from the seed, its kind, the weights of its operations and the faults included, and one goroutine does
// all, hosts that share a root taking turns; so a seed replays. The exception are the histories of many clients, in which
// the scheduler has a say.
type history struct {
	testing.TB
	seed    uint64
	rng     *rand.Rand
	kind    historyKind
	parties []*party
	deeds   []deed
	trace   []string
	faults  []faultfs.Rule // of the kind; nil: nothing fails but by deeds
	now     atomic.Int64   // of hosts that take turns
	turns   sync.Mutex
	slots   *staging.Slots
	uses    atomic.Int64 // policies given to stores
	done    atomic.Int64 // and given back

	mu      sync.Mutex // of the model, for many clients
	offered map[piece]map[uint64]bool
	spoilt  map[entryOf]bool // some file was damaged or removed behind the stores' back
	version uint64
	loads   atomic.Int64 // begun
	ends    atomic.Int64
	hits    atomic.Int64
	stored  atomic.Int64
}

// piece is what bytes are offered under; entryOf, what a lookup asks for.
type piece struct {
	entryOf
	rank uint32
}

type entryOf struct {
	space int
	n     uint64
}

type historyKind struct {
	name   string
	hosts  int
	roots  int
	faults string // rules, with a seed each
	power  bool   // the machine can lose its power
	many   bool   // clients at the same time
}

// aloneFaults strike a few in a hundred calls of each kind.
const (
	aloneFaults = `
	write ** 2%% seed %d: enospc
	write ** 1%% seed %d: short
	publish ** 3%% seed %d: eio
	publish ** 3%% seed %d: eio after
	remove ** 2%% seed %d: eio
	remove ** 2%% seed %d: eio after
	open **_r* 1%% seed %d: emfile
	open **.tmp 1%% seed %d: eio after
	sync ** 3%% seed %d: eio
	syncdir ** 2%% seed %d: eio
	close ** 1%% seed %d: eio after
	stat **_r* 1%% seed %d: estale
	read ** 1%% seed %d: eio
`
	sharedFaults = `
	write **.tmp 2%% seed %d: enospc
	link ** 3%% seed %d: eio
	link ** 3%% seed %d: eio after
	remove ** 2%% seed %d: eio
	remove ** 2%% seed %d: eio after
	rename ** 1%% seed %d: eio
	rename ** 1%% seed %d: eio after
	open **_r* 1%% seed %d: emfile
	open **.tmp 1%% seed %d: eio after
	write **/log.* 1%% seed %d: eio
	readdir **/shared/** 1%% seed %d: estale
	stat **_r* 1%% seed %d: eio
`
)

var historyKinds = []historyKind{
	{name: "clean", hosts: 1, roots: 1},
	{name: "faults", hosts: 1, roots: 1, faults: aloneFaults},
	{name: "shared", hosts: 2, roots: 1},
	{name: "two roots", hosts: 1, roots: 2},
	{name: "power", hosts: 1, roots: 1, power: true},
	{name: "shared with faults", hosts: 2, roots: 1, faults: sharedFaults},
	{name: "many clients", hosts: 1, roots: 2, many: true},
	{name: "two roots with faults", hosts: 1, roots: 2, faults: aloneFaults},
	{name: "shared by many clients", hosts: 2, roots: 1, many: true},
}

// TestRandomHistories plays a few seeds of each kind, and more for as long as told.
func TestRandomHistories(t *testing.T) {
	if *historySeed != 0 {
		runHistory(t, *historySeed, &tally{})
		return
	}
	var all tally
	seeds := 2 * uint64(len(historyKinds))
	if testing.Short() || raceDetector {
		seeds = uint64(len(historyKinds))
	}
	for seed := uint64(1); seed <= seeds; seed++ {
		runHistory(t, seed, &all)
	}
	for end, seed := time.Now().Add(*historyTime), uint64(time.Now().UnixNano()); *historyTime > 0 && time.Now().Before(end) && !t.Failed(); seed++ {
		runHistory(t, seed, &all)
		seeds++
	}
	t.Logf("%d histories: %+v", seeds, all)
	if all.stored == 0 || all.loads == 0 {
		t.Error("the histories are about nothing")
	}
}

// tally is what histories consisted of.
type tally struct{ operations, stored, loads int64 }

const historySteps = 300

func runHistory(t *testing.T, seed uint64, all *tally) {
	kind := historyKinds[seed%uint64(len(historyKinds))]
	t.Run(fmt.Sprintf("seed=%d/%s", seed, strings.ReplaceAll(kind.name, " ", "-")), func(t *testing.T) {
		h := &history{TB: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), kind: kind, offered: map[piece]map[uint64]bool{}, spoilt: map[entryOf]bool{}}
		if _, err := workshop(); err != nil { // it opens files once
			t.Fatal(err)
		}
		before := leftovers(t)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("replay: -run TestRandomHistories -history.seed=%d\n%s", seed, strings.Join(h.trace[max(0, len(h.trace)-*historyTrace):], "\n"))
			}
		})
		h.begin()
		for range historySteps {
			h.step()
			all.operations++
		}
		h.end()
		h.awaitNothingLeft(before)
		all.stored += h.stored.Load()
		all.loads += h.loads.Load()
	})
}

// leftovers is what a history that has ended has left in the process.
type leftover struct{ goroutines, descriptors int }

func leftovers(t testing.TB) leftover {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return leftover{runtime.NumGoroutine(), len(list)}
}

func (h *history) awaitNothingLeft(before leftover) {
	h.Helper()
	var now leftover
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if now = leftovers(h); now.goroutines <= before.goroutines && now.descriptors <= before.descriptors && h.uses.Load() == h.done.Load() {
			return
		}
	}
	h.Fatalf("%+v before, %+v after; %d policies used, %d given back", before, now, h.uses.Load(), h.done.Load())
}

// begin opens the stores and draws how often each deed is done.
func (h *history) begin() {
	if n := strings.Count(h.kind.faults, "%d"); n > 0 {
		seeds := make([]any, n)
		for i := range seeds {
			seeds[i] = h.rng.Uint64N(1 << 32)
		}
		h.faults = faultfs.MustRules(fmt.Sprintf(h.kind.faults, seeds...))
	}
	var err error
	if h.slots, err = staging.NewSlots(8, 2*pieceBytes); err != nil {
		h.Fatal(err)
	}
	base := h.TempDir()
	for i := range h.kind.hosts {
		p := h.newParty(i, base)
		h.parties = append(h.parties, p)
		p.drawPolicies(h.rng)
		p.open()
		p.faulty.Set(h.faults...)
	}
	h.deeds = h.drawDeeds()
}

// step lets one host do one deed, and looks at everything.
func (h *history) step() {
	p := h.parties[h.rng.IntN(len(h.parties))]
	what := h.deed(p)
	h.trace = append(h.trace, fmt.Sprintf("%d: host %s: %s", len(h.trace), p.cfg.HostID, what))
	for _, p := range h.parties {
		if err := p.invariants(); err != nil {
			h.Fatalf("step %d (%s): host %s: %v", len(h.trace)-1, what, p.cfg.HostID, err)
		}
	}
	if a, b := h.loads.Load(), h.ends.Load(); a != b {
		h.Fatalf("%d loads were begun, %d have ended", a, b)
	}
}

// end closes everything, by way of a crash, so that the account is compared with what a scan finds.
func (h *history) end() {
	for _, p := range h.parties {
		p.faulty.Set()
		p.letGo()
		p.wakeUp()
	}
	h.calm()
	for _, p := range h.parties {
		for _, r := range p.store.roots {
			if err := r.idle(); err != nil {
				h.Fatalf("host %s: %v", p.cfg.HostID, err)
			}
		}
	}
	for _, p := range h.parties {
		p.crash()
		p.drawPolicies(h.rng)
		p.open()
	}
	h.calm()
	for _, p := range h.parties {
		for _, r := range p.store.roots {
			if err := r.idle(); err != nil {
				h.Fatalf("host %s, reopened: %v", p.cfg.HostID, err)
			}
		}
		p.readAll()
	}
	h.compareAccounts()
	for _, p := range h.parties {
		if err := p.store.Close(); err != nil {
			h.Fatal(err)
		}
		p.endMachine()
	}
	if err := h.slots.Close(); err != nil {
		h.Fatal(err)
	}
	if h.Failed() {
		return
	}
	for _, root := range h.parties[0].cfg.Roots {
		h.noTemporaries(root.Path)
	}
}

func (h *history) noTemporaries(dir string) {
	err := filepath.WalkDir(dir, func(name string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			if _, temp := pieceformat.ParseTemp(e.Name()); temp || strings.HasSuffix(name, ".new") {
				h.Errorf("left over: %s", name)
			}
		}
		return err
	})
	if err != nil {
		h.Fatal(err)
	}
}
