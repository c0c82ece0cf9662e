package transfer

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/staging"
)

// RouteChoice says how the pieces of one root are to move to and from one GPU.
type RouteChoice struct {
	Direct *gds.DirectRoute // nil: staged
	Submit gds.Submit       // how cuFile is asked
	Always bool             // tried for every piece, however often it fails; not while it hangs
	Shared bool             // others remove files of the root: none is kept registered
	Via    string           // what cuFile's own statistics called the route
	Why    string           // it was chosen
}

// A route that fails this often in a row is left for a time that doubles with every failed trial.
const (
	failuresToSuspend = 3
	firstSuspension   = 10 * time.Second
	longestSuspension = 10 * time.Minute
)

// route is a choice and what became of it. An operation that fails on the direct route is done again on the staged one,
// within the same task; a route that fails again and again is left, and tried again later with one operation.
type route struct {
	choice RouteChoice
	gpu    string
	root   string
	log    *slog.Logger
	now    func() time.Time

	stores, loads, bytes                atomic.Int64
	storeFallbacks, loadFallbacks, full atomic.Int64
	storesHung                          atomic.Int64
	suspended, resumed, mismatched      atomic.Int64

	mu         sync.Mutex
	fails      int       // in a row
	until      time.Time // when it may be tried again; zero while it is in force
	suspension time.Duration
	probing    bool // one operation is testing whether the route works again
}

// attempt is one operation's turn on the direct route. One of worked, failed and passed must follow. Once the route is left,
// only the trial decides about it: what was begun before and ends later proves nothing.
type attempt struct {
	*route // nil: the operation is to be staged
	probe  bool
}

type routeKey struct {
	gpu  *gds.GPU
	root string
}

// SetRoute says how the pieces of a root, named by its directory, move to and from a GPU from now on. Without it they are
// staged.
func (e *Engine) SetRoute(g *gds.GPU, root string, c RouteChoice) {
	e.routesMu.Lock()
	defer e.routesMu.Unlock()
	e.routes[routeKey{g, root}] = &route{
		choice: c, gpu: g.UUID.String(), root: root, log: e.cfg.Log.With("gpu", g.UUID.String(), "root", root), now: time.Now,
	}
}

// direct is a turn on the direct route between a memory and a root, the zero one where there is none or it is not to be
// taken now.
func (e *Engine) direct(m Memory, root string) attempt {
	d, ok := m.(flaggedMemory)
	if !ok {
		return attempt{}
	}
	e.routesMu.RLock()
	r := e.routes[routeKey{d.gpu, root}]
	e.routesMu.RUnlock()
	if r == nil || r.choice.Direct == nil {
		return attempt{}
	}
	return r.attempt()
}

func (r *route) attempt() attempt {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.active():
		return attempt{route: r}
	case r.probing || r.now().Before(r.until):
		return attempt{}
	}
	r.probing = true
	return attempt{r, true}
}

// active says that pieces take the direct route now. mu is held.
func (r *route) active() bool { return r.until.IsZero() }

// worked books an operation of the direct route.
func (a attempt) succeeded(kind *atomic.Int64, bytes int64) {
	r := a.route
	kind.Add(1)
	r.bytes.Add(bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case a.probe:
		r.until, r.suspension, r.probing, r.fails = time.Time{}, 0, false, 0
		r.resumed.Add(1)
		r.log.Info("the direct route works again")
	case r.active():
		r.fails = 0
	}
}

// forget has cuFile let go of a file of a root where others remove files, which would keep its blocks.
func (r *route) forget(f staging.File) {
	if !r.choice.Shared {
		return
	}
	if info, err := f.Stat(); err == nil {
		r.choice.Direct.Handles.Forget(info.Dev, info.Ino)
	}
}

// passed says that nothing was learned: the operation was not begun, or was cancelled.
func (a attempt) skipped() {
	if !a.probe {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.route.probing = false
}

// failed books an operation that failed, and is done again on the staged route if it can be. bad says that once is enough. A
// route that is wanted always is left for an operation that did not end, and for nothing else.
func (a attempt) failed(kind *atomic.Int64, err error, bad bool) {
	r := a.route
	kind.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !a.probe && !r.active() {
		return
	}
	r.fails++
	if a.probe || (bad || r.fails >= failuresToSuspend) && (!r.choice.Always || errors.Is(err, gds.ErrHung)) {
		r.suspension = min(max(2*r.suspension, firstSuspension), longestSuspension)
		r.until, r.probing, r.fails = r.now().Add(r.suspension), false, 0
		r.suspended.Add(1)
		r.log.Warn("the direct route is left: pieces are staged", "for", r.suspension, "error", err)
		return
	}
	if r.fails == 1 {
		r.log.Warn("a direct operation failed", "error", err)
	}
}

// RouteStats is one route's state and counters.
type RouteStats struct {
	GPU, Root            string
	Route                string // "direct" or "staged", as it is now
	Via, Why             string
	Stores, Loads, Bytes int64           // that went direct; bytes of files
	StoreFallbacks       int64           // stores that failed there and were staged
	LoadFallbacks        int64           // likewise loads
	StoresHung           int64           // stores that failed because cuFile did not answer in time
	Hung                 int             // operations of the GPU that were given up and have not ended
	Full                 int64           // operations that found no slot and were staged
	Mismatched           int64           // loads whose bytes were wrong by the direct route alone
	Suspended, Resumed   int64           // how often the route was left, and taken up again
	SlotsInUse           int             // of the GPU
	SlotBytes            int64           // likewise
	Handles              gds.HandleStats // likewise
}

// Routes reads the routes' counters, by GPU and root.
func (e *Engine) Routes() []RouteStats {
	e.routesMu.RLock()
	defer e.routesMu.RUnlock()
	var out []RouteStats
	direct := map[string]*gds.DirectRoute{} // of each GPU, the same for all of its roots that have one
	for _, r := range e.routes {
		if r.choice.Direct != nil {
			direct[r.gpu] = r.choice.Direct
		}
	}
	for _, r := range e.routes {
		s := RouteStats{
			GPU: r.gpu, Root: r.root, Route: "staged", Via: r.choice.Via, Why: r.choice.Why,
			Stores: r.stores.Load(), Loads: r.loads.Load(), Bytes: r.bytes.Load(),
			StoreFallbacks: r.storeFallbacks.Load(), LoadFallbacks: r.loadFallbacks.Load(), Full: r.full.Load(),
			StoresHung: r.storesHung.Load(), Mismatched: r.mismatched.Load(), Suspended: r.suspended.Load(), Resumed: r.resumed.Load(),
		}
		r.mu.Lock()
		if r.choice.Direct != nil && r.active() {
			s.Route = "direct"
		}
		r.mu.Unlock()
		if d := direct[r.gpu]; d != nil {
			s.SlotsInUse, s.SlotBytes = d.Slots()
			s.Handles = d.Handles.Stats()
			s.Hung = d.GPU().Hung()
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b RouteStats) int {
		if c := strings.Compare(a.GPU, b.GPU); c != 0 {
			return c
		}
		return strings.Compare(a.Root, b.Root)
	})
	return out
}
