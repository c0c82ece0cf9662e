package policy

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// OnFault is the host's reaction to a failed policy.
type OnFault uint8

const (
	// UseBuiltin: the built-in policy answers while the module is restarted, and permanently once it is in quarantine.
	UseBuiltin OnFault = iota
	// Stop: the host ends. Until then the role has no answers.
	Stop
)

// Verdict is the reaction of a role to a fault of its module.
type Verdict uint8

const (
	Restart    Verdict = iota // restart after a pause, during which the built-in policy answers
	Quarantine                // no restart: the built-in policy answers from now on
	Halt                      // no answers: the host is asked to end
)

// guard counts a module's faults, over all its roles.
type guard struct {
	mu          sync.Mutex
	onFault     OnFault
	stop        func(error) // called once, with the fault
	backoff     Backoff
	quarantined error
}

// Failed records a failure of a role of the module, and returns the verdict and the pause before a restart.
func (m *Module) Failed(role abi.Role, cause error) (Verdict, time.Duration) {
	g := &m.guard
	g.mu.Lock()
	defer g.mu.Unlock()
	log := m.log.With("role", role.String(), "error", cause)
	if g.onFault == Stop && g.quarantined != nil {
		return Halt, 0 // logged once
	}
	if g.onFault == Stop {
		log.Error("policy failed; the host stops, as configured")
		if g.stop != nil {
			g.stop(fmt.Errorf("%w: %s: on_fault = stop: %w", ErrQuarantine, m.name, cause))
		}
		g.quarantined = cause
		return Halt, 0
	}
	if m.code == nil { // native code would fail in the same way again
		log.Error("policy failed; the built-in one takes over", "policy", m.name)
		return Quarantine, 0
	}
	g.backoff.Window = faultWindow
	pause, again := g.backoff.Failed(time.Now())
	if n := g.backoff.Faults(); g.quarantined == nil && !again {
		g.quarantined = fmt.Errorf("%w: %s: %d faults within %v, the last: %w", ErrQuarantine, m.name, n, faultWindow, cause)
		log.Error("policy is in quarantine: the built-in one answers until the host is restarted", "faults", n, "sha256",
			m.digest)
	}
	if g.quarantined != nil {
		return Quarantine, 0
	}
	log.Warn("policy failed; the built-in one answers until it is restarted", "pause", pause)
	return Restart, pause
}

// Quarantined returns the reason for the module's quarantine, or nil.
func (m *Module) Quarantined() error {
	m.guard.mu.Lock()
	defer m.guard.mu.Unlock()
	return m.guard.quarantined
}

// restarter restarts one role's guest after a fault, in a goroutine that ends with the role.
type restarter struct {
	m      *Module
	role   abi.Role
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// failed records a fault. If the module may be restarted, start is called after the pause, and again while it fails.
func (r *restarter) failed(cause error, start func(context.Context) error) Verdict {
	verdict, pause := r.m.Failed(r.role, cause)
	if verdict == Restart {
		r.wg.Go(func() {
			Supervise(r.ctx, pause, start, func(err error) (Verdict, time.Duration) { return r.m.Failed(r.role, err) })
		})
	}
	return verdict
}

// close ends a restart in progress. The role must not call failed any more.
func (r *restarter) close() {
	r.cancel()
	r.wg.Wait()
}
