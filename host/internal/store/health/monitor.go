package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// Root is the interface of a monitor to its root.
type Root interface {
	// Probe checks that the root's directory may be used and that it can be written and read. It reports whether the directory
	// is empty. It uses the bare files.
	Probe() (empty bool, err error)
	// Reopen brings the root up to date and ends with Promote from the given state, which is [Returning] or [ReadOnly].
	Reopen(ctx context.Context, from State, empty bool) error
}

type Config struct {
	Dir   string
	FS    staging.FS
	Limit time.Duration // limit of one file operation; negative means no limit
	Every time.Duration // interval of checks, and the unit of the pauses between probes
	Now   func() time.Time
	Log   *slog.Logger
	// Remote means that the root is reached by requests to a server and has no local device.
	Remote bool
	Ended  func() // called when an abandoned operation has ended, since a probe may be due
}

// Monitor keeps the state of one root. It is safe for concurrent use. Its lock may be taken while any other is held.
type Monitor struct {
	cfg     Config
	watched *staging.WatchedFS // refuses operations while the root is out, and reports their errors to the monitor
	bare    *staging.WatchedFS // for probes: refuses nothing, and errors have no consequences
	state   atomic.Uint32

	mu      sync.Mutex
	reason  string
	since   time.Time
	outages uint64
	errors  float64
	counted time.Time // time to which errors refers
	tries   int       // probes since the root was last in service
	due     time.Time // time of the next probe
}

const (
	// tolerated is the number of device errors that takes the root out. One error is forgotten every forgetAfter.
	tolerated   = 8
	forgetAfter = 5 * time.Second
	// MaxPause is the longest pause before the store repeats a failed operation on a root in service, in units of Config.Every.
	MaxPause = 64
	// mostPause is the longest pause between probes, in units of Config.Every. A device that is back is used again within 5 s,
	// even after a long outage.
	mostPause = 4
)

// NewMonitor returns the monitor of a root that is in service.
func NewMonitor(cfg Config) *Monitor {
	m := &Monitor{cfg: cfg}
	ended := func(staging.Op, string) { cfg.Ended() }
	m.watched = staging.Watched(cfg.FS, staging.Watch{Limit: cfg.Limit, Admit: m.admit, Seen: m.Saw, Ended: ended})
	m.bare = staging.Watched(cfg.FS, staging.Watch{Limit: cfg.Limit, Ended: ended})
	return m
}

// FS returns the root's files. Operations fail with [ErrOut] while the root is out.
func (m *Monitor) FS() *staging.WatchedFS { return m.watched }

// Bare returns the root's files for probes.
func (m *Monitor) Bare() *staging.WatchedFS { return m.bare }

// Close ends the observation.
func (m *Monitor) Close() {
	m.watched.Close()
	m.bare.Close()
}

func (m *Monitor) State() State { return State(m.state.Load()) }

// Serves reports whether the root can serve loads.
func (m *Monitor) Serves() bool { return m.State() <= ReadOnly }

// Takes reports whether the root takes stores.
func (m *Monitor) Takes() bool { return m.State() <= Full }

// Stuck returns the number of abandoned operations that have not ended.
func (m *Monitor) Stuck() int { return m.watched.Stuck() + m.bare.Stuck() }

// Report is the state of a monitor and its history.
type Report struct {
	State   State
	Reason  string    // why the root is not in full service
	Since   time.Time // time of the last change of state; zero if there was none
	Outages uint64    // times that the root was taken out
}

func (m *Monitor) Report() Report {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Report{min(m.State(), Out), m.reason, m.since, m.outages}
}

// OutError returns the error for operations that need the root while it is out.
func (m *Monitor) OutError() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return fmt.Errorf("%w: %s since %s: %s", ErrOut, m.cfg.Dir, m.since.Format(time.TimeOnly), m.reason)
}

func (m *Monitor) admit(staging.Op) error {
	if m.State() == Out {
		return m.OutError()
	}
	return nil
}

// Saw evaluates the error of an operation.
func (m *Monitor) Saw(op staging.Op, name string, err error) {
	switch Judge(err) {
	case Unanswered:
		m.TakeOut("no answer", err, m.advice())
	case Protected:
		m.Demote(ReadOnly, "its file system is read-only", err, "find out why, then remount it for writing")
	case Device:
		if m.tooMany() {
			m.TakeOut("repeated errors", err, m.advice())
		}
	}
}

// OutAtOpening takes a root out of service that cannot be opened.
func (m *Monitor) OutAtOpening(cause error) {
	m.TakeOut("it cannot be opened", cause, m.advice()+"; the others serve")
}

// advice returns a hint where to look for the cause of a failure.
func (m *Monitor) advice() string {
	if m.cfg.Remote {
		return "look after the server and the way to it: kvhost check makes a request of each kind"
	}
	return "look after the device, the mount and the kernel's log"
}

func (m *Monitor) tooMany() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.cfg.Now()
	m.errors = max(0, m.errors-now.Sub(m.counted).Seconds()/forgetAfter.Seconds()) + 1
	m.counted = now
	return m.errors >= tolerated
}

// TakeOut takes the root out of service until a probe succeeds.
func (m *Monitor) TakeOut(reason string, cause error, advice string) {
	m.mu.Lock()
	was := m.State()
	if was == Out {
		m.mu.Unlock()
		return
	}
	m.state.Store(uint32(Out))
	m.reason = fmt.Sprintf("%s (%v)", reason, cause)
	m.errors = 0
	if was != Returning {
		m.since = m.cfg.Now()
		m.outages++
	}
	m.postpone()
	m.mu.Unlock()
	if was != Returning {
		m.cfg.Log.Error("root out of service: lookups miss, stores use other roots; will retry", "reason", reason,
			"error", cause, "advice", advice)
	}
}

// Demote restricts the use of the root to a lower state.
func (m *Monitor) Demote(to State, reason string, cause error, advice string) {
	m.mu.Lock()
	if m.State() >= to {
		m.mu.Unlock()
		return
	}
	m.state.Store(uint32(to))
	m.reason, m.since = fmt.Sprintf("%s (%v)", reason, cause), m.cfg.Now()
	m.postpone()
	m.mu.Unlock()
	does := "root takes no new chunks for now, and serves what it has; will retry"
	if to == Full {
		does = "root takes new chunks only in the place of others for now, or other roots take them; will retry"
	}
	m.cfg.Log.Error(does, "state", to.String(), "reason", reason, "error", cause, "advice", advice)
}

// Promote changes the root from one state to a better one. It returns false if the root has left the first state in between.
func (m *Monitor) Promote(from, to State) bool {
	m.mu.Lock()
	if !m.state.CompareAndSwap(uint32(from), uint32(to)) {
		m.mu.Unlock()
		return false
	}
	if to != In {
		m.mu.Unlock()
		return true
	}
	now := m.cfg.Now()
	lasted := now.Sub(m.since)
	m.reason, m.since, m.tries = "", now, max(0, m.tries-1) // a root that fails again and again is probed less and less often
	m.mu.Unlock()
	m.cfg.Log.Info("root is back in service", "after", lasted.Round(time.Millisecond))
	return true
}

// postpone schedules the next probe after a pause that doubles each time. m.mu must be held.
func (m *Monitor) postpone() {
	m.due = m.cfg.Now().Add(m.cfg.Every * time.Duration(min(1<<min(m.tries, 16), mostPause)))
	m.tries++
}

// Check tries to return a root to service that is out or read-only. It does so when a probe is due and all abandoned operations
// have ended.
func (m *Monitor) Check(ctx context.Context, r Root) {
	if state := m.State(); state == In || state == Full {
		return
	}
	m.mu.Lock()
	early := m.cfg.Now().Before(m.due)
	m.mu.Unlock()
	if early || m.Stuck() > 0 {
		return
	}
	if err := m.Reopen(ctx, r); err != nil {
		m.mu.Lock()
		m.postpone()
		m.mu.Unlock()
		m.cfg.Log.Debug("root is not taken back yet", "error", err)
	}
}

// Reopen returns a root to service that is out or read-only, in the following steps. If a step fails, the caller schedules the
// next attempt.
//
//  1. All abandoned operations must have ended, which the caller has checked. No old operation can then take effect late, such as a write, or a rename to a name that is in use again.
//  2. The directory is checked: see [Root].Probe.
//  3. The root is brought up to date: see [Root].Reopen.
func (m *Monitor) Reopen(ctx context.Context, r Root) error {
	state := m.State()
	empty, err := r.Probe()
	if err != nil {
		return err
	}
	if state == ReadOnly {
		return r.Reopen(ctx, ReadOnly, empty)
	}
	if !m.Promote(Out, Returning) {
		return ErrOut
	}
	defer m.state.CompareAndSwap(uint32(Returning), uint32(Out)) // unless it was promoted
	return r.Reopen(ctx, Returning, empty)
}

// State is the extent to which a root is used.
type State uint32

const (
	// In means full use.
	In State = iota
	// Full means that the file system is full. The root takes stores only in place of entries that it evicts, and only if no
	// other root takes them.
	Full
	// ReadOnly means that the root takes no stores.
	ReadOnly
	// Out means that the root is not used: lookups miss, and no operation is started. It is probed and returns by itself.
	Out
	// Returning is like Out, but operations are started to bring the root up to date.
	Returning
)

func (s State) String() string {
	switch s {
	case Full:
		return "full"
	case ReadOnly:
		return "read-only"
	case Out, Returning:
		return "out"
	}
	return "in"
}

var (
	// ErrOut means that a root is out of service.
	ErrOut = errors.New("store: root is out of service")
	// ErrProbe means that a probe read back other bytes than it wrote.
	ErrProbe = errors.New("store: a probe reads back as something else")
	// ErrNoParent means that the directory above a missing root is missing, too.
	ErrNoParent = errors.New("its parent directory does not exist")
	// ErrNotMounted means that a root with require_mount is on the file system of /.
	ErrNotMounted = errors.New("it is on the file system of /")
)

// Hung reports whether an operation gave no answer within its limit.
func Hung(err error) bool { return errors.Is(err, staging.ErrHung) }
