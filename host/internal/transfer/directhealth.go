package transfer

import (
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/staging"
)

// RouteChoice is the route of the pieces between one root and one GPU.
type RouteChoice struct {
	Direct *gds.DirectRoute // nil: staged
	Always bool             // try the direct route for every piece, even after failures, unless it hangs
	Shared bool             // other hosts remove files of the root, so no file stays registered
	Via    string           // the path according to cuFile's statistics
	Why    string           // the reason for the choice
}

// A route that fails this often in a row is suspended. The suspension doubles with every failed probe.
const (
	failuresToSuspend = 3
	firstSuspension   = 10 * time.Second
	longestSuspension = 10 * time.Minute
)

// gpuRoute is the choice for a GPU and a root, and its history. A direct route that fails repeatedly is suspended and
// probed later with one operation.
type gpuRoute struct {
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
	fails      int       // failures in a row
	until      time.Time // time of the next probe; zero while the route is active
	suspension time.Duration
	probing    bool // a probe is running
}

// attempt is one operation's use of the direct route. It ends with one of succeeded, failed and skipped. Only the probe
// resumes a suspended route: an operation that started before the suspension proves nothing.
type attempt struct {
	*gpuRoute // nil: the operation does not use the direct route
	probe     bool
}

// routeChoices are the choices of an engine.
type routeChoices struct {
	mu     sync.RWMutex
	chosen map[routeKey]*gpuRoute
}

type routeKey struct {
	gpu  *gds.GPU
	root string
}

func (r *gpuRoute) attempt() attempt {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.active():
		return attempt{gpuRoute: r}
	case r.probing || r.now().Before(r.until):
		return attempt{}
	}
	r.probing = true
	return attempt{r, true}
}

// active reports whether pieces take the direct route now. The caller holds mu.
func (r *gpuRoute) active() bool { return r.until.IsZero() }

// succeeded records an operation of the direct route.
func (a attempt) succeeded(kind *atomic.Int64, bytes int64) {
	r := a.gpuRoute
	kind.Add(1)
	r.bytes.Add(bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case a.probe:
		r.until, r.suspension, r.probing, r.fails = time.Time{}, 0, false, 0
		r.resumed.Add(1)
		r.log.Info("direct route resumed")
	case r.active():
		r.fails = 0
	}
}

// forget closes cuFile's handle of a file if other hosts remove files of the root: the handle would keep the file's
// blocks.
func (r *gpuRoute) forget(f staging.File) {
	if !r.choice.Shared {
		return
	}
	if info, err := f.Stat(); err == nil {
		r.choice.Direct.Handles.Forget(info.Dev, info.Ino)
	}
}

// skipped ends an attempt without a result: the operation was not started, or was cancelled, because of err.
func (a attempt) skipped(err error) error {
	if a.probe {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.gpuRoute.probing = false
	}
	return err
}

// failed records a failed operation, which the staged route repeats if possible. With bad it suspends the route at
// once. A route with Always is suspended only after an operation that hangs.
func (a attempt) failed(kind *atomic.Int64, err error, bad bool) {
	r := a.gpuRoute
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
		r.log.Warn("direct route suspended, pieces are staged", "for", r.suspension, "error", err)
		return
	}
	if r.fails == 1 {
		r.log.Warn("direct operation failed, piece is staged", "error", err)
	}
}
