package policy

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// OnFault says what becomes of a host whose policy failed.
type OnFault uint8

const (
	// UseBuiltin: the built-in policy answers while the module is restarted, and for good once it is in quarantine.
	UseBuiltin OnFault = iota
	// Stop: the host ends. Until it has, nothing answers in the module's place.
	Stop
)

// Verdict is what a role does after a fault of its module.
type Verdict uint8

const (
	Restart    Verdict = iota // after a pause; the built-in policy answers meanwhile
	Quarantine                // never: the built-in policy answers from now on
	Halt                      // nothing: the host is told to end
)

// A module that fails again and again is a bug that its restarts do not mend: each costs an instance, a replay, and
// decisions that are not its own.
const (
	firstPause  = 100 * time.Millisecond // doubled by each fault that the window holds
	faultWindow = 10 * time.Minute
	mostFaults  = 6 // within the window: the last one is the end
)

// guard remembers a module's faults, those of all its roles together.
type guard struct {
	mu      sync.Mutex
	onFault OnFault
	stop    func(error) // called once
	recent  []time.Time
	banned  error
}

// Failed notes that a role of the module ended with an error, and says what is to be done about it.
func (m *Module) Failed(role abi.Role, cause error) (Verdict, time.Duration) {
	g := &m.guard
	g.mu.Lock()
	defer g.mu.Unlock()
	log := m.log.With("role", role.String(), "error", cause)
	if g.onFault == Stop && g.banned != nil {
		return Halt, 0 // said once
	}
	if g.onFault == Stop {
		log.Error("policy failed; the host stops, as configured")
		if g.banned == nil && g.stop != nil {
			g.stop(fmt.Errorf("%w: %s: on_fault = stop: %w", ErrQuarantine, m.name, cause))
		}
		g.banned = cause
		return Halt, 0
	}
	if m.code == nil { // linked in: the same would happen again
		log.Error("policy failed; the built-in one takes over", "policy", m.name)
		return Quarantine, 0
	}
	now := time.Now()
	for len(g.recent) > 0 && now.Sub(g.recent[0]) > faultWindow {
		g.recent = g.recent[1:]
	}
	g.recent = append(g.recent, now)
	if g.banned == nil && len(g.recent) >= mostFaults {
		g.banned = fmt.Errorf("%w: %s: %d faults within %v, the last: %w", ErrQuarantine, m.name, len(g.recent), faultWindow, cause)
		log.Error("policy is in quarantine: the built-in one answers until the host is restarted", "faults", len(g.recent), "sha256", m.digest)
	}
	if g.banned != nil {
		return Quarantine, 0
	}
	pause := firstPause << (len(g.recent) - 1)
	log.Warn("policy failed; the built-in one answers until it is restarted", "pause", pause)
	return Restart, pause
}

// Quarantined is why the module is not started any more, nil while it may be.
func (m *Module) Quarantined() error {
	m.guard.mu.Lock()
	defer m.guard.mu.Unlock()
	return m.guard.banned
}

// revival restarts one role's guest after a fault, in a goroutine of its own that ends with the role.
type revival struct {
	m    *Module
	role abi.Role
	ctx  context.Context
	end  context.CancelFunc
	work sync.WaitGroup
}

func newRevival(m *Module, role abi.Role) *revival {
	r := &revival{m: m, role: role}
	r.ctx, r.end = context.WithCancel(context.Background())
	return r
}

// failed notes a fault. When the module may be restarted, start is called after the pause, and once more after each
// further fault of its own.
func (r *revival) failed(cause error, start func(context.Context) error) Verdict {
	verdict, pause := r.m.Failed(r.role, cause)
	if verdict != Restart {
		return verdict
	}
	r.work.Go(func() {
		for verdict == Restart {
			select {
			case <-r.ctx.Done():
				return
			case <-time.After(pause):
			}
			err := start(r.ctx)
			if err == nil || r.ctx.Err() != nil {
				return
			}
			verdict, pause = r.m.Failed(r.role, err)
		}
	})
	return verdict
}

// close ends a restart under way. The role must not call failed any more.
func (r *revival) close() {
	r.end()
	r.work.Wait()
}
