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

// Root is what a monitor needs of its root.
type Root interface {
	// Probe says whether the root's directory is one to continue with, whether it is empty, and whether it can be written
	// and read. It uses the unwatched files.
	Probe() (empty bool, err error)
	// Reopen brings the root up to date and ends with Promote from the state given: [Returning], or [ReadOnly] if it was
	// that.
	Reopen(ctx context.Context, from State, empty bool) error
}

type Config struct {
	Dir   string
	FS    staging.FS
	Limit time.Duration // of one operation on files; negative: none
	Every time.Duration // between checks; the unit of the pauses between probes
	Now   func() time.Time
	Log   *slog.Logger
	// Remote says that the root is reached by requests to a server, and has no device here.
	Remote bool
	Ended  func() // called when an operation that was given up has ended: a probe may be due
}

// Monitor is one root's state. It is safe for concurrent use, and its lock may be taken with any other held.
type Monitor struct {
	cfg     Config
	watched *staging.WatchedFS // refuses operations while the root is out; their errors are seen
	bare    *staging.WatchedFS // for probes: refuses nothing, and what fails has no consequences
	state   atomic.Uint32

	mu      sync.Mutex
	reason  string
	since   time.Time
	outages uint64
	errors  float64
	counted time.Time // when errors was right
	tries   int       // probes since the root was last in
	due     time.Time // of the next probe
}

const (
	// tolerated is how many errors of a device take its root out. They are forgotten one by one.
	tolerated   = 8
	forgetAfter = 5 * time.Second
	// MaxPause is the longest pause before the store tries again what failed in a root that is in service, in Config.Every.
	MaxPause = 64
	// mostPause is that between probes: a device that is back is in use 5 s later, however long it was away.
	mostPause = 4
)

// NewMonitor makes the monitor of a root that is in service.
func NewMonitor(cfg Config) *Monitor {
	m := &Monitor{cfg: cfg}
	ended := func(staging.Op, string) { cfg.Ended() }
	m.watched = staging.Watched(cfg.FS, staging.Watch{Limit: cfg.Limit, Admit: m.admit, Seen: m.Saw, Ended: ended})
	m.bare = staging.Watched(cfg.FS, staging.Watch{Limit: cfg.Limit, Ended: ended})
	return m
}

// FS is the root's files. Its operations fail with [ErrOut] while the root is out.
func (m *Monitor) FS() *staging.WatchedFS { return m.watched }

// Bare is the root's files for probes.
func (m *Monitor) Bare() *staging.WatchedFS { return m.bare }

// Close ends the watching.
func (m *Monitor) Close() {
	m.watched.Close()
	m.bare.Close()
}

func (m *Monitor) State() State { return State(m.state.Load()) }

// Serves says whether loads can come from the root.
func (m *Monitor) Serves() bool { return m.State() <= ReadOnly }

// Takes says whether stores can go to the root.
func (m *Monitor) Takes() bool { return m.State() <= Full }

// Stuck is the number of operations that were given up and have not ended.
func (m *Monitor) Stuck() int { return m.watched.Stuck() + m.bare.Stuck() }

// Report is a monitor's state and its history.
type Report struct {
	State   State
	Reason  string    // why the root is not in
	Since   time.Time // of the state; zero from the start
	Outages uint64    // times that the root was taken out
}

func (m *Monitor) Report() Report {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Report{min(m.State(), Out), m.reason, m.since, m.outages}
}

// OutError is the error of what needs the root while it is out.
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

// Saw judges an operation that failed.
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

// OutAtOpening leaves a root out that cannot be opened.
func (m *Monitor) OutAtOpening(cause error) {
	m.TakeOut("it cannot be opened", cause, m.advice()+"; the others serve")
}

// advice is where to look when a root does not do what it is to do.
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

// TakeOut ends the root's service until a probe succeeds.
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

// Demote restricts the root to less than it was used for.
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

// Promote returns the root from one state to another that is used for more. It is false when the root was taken out
// before.
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
	m.reason, m.since, m.tries = "", now, max(0, m.tries-1) // a root that comes and goes is probed less and less often
	m.mu.Unlock()
	m.cfg.Log.Info("root is back in service", "after", lasted.Round(time.Millisecond))
	return true
}

// postpone sets the next probe, after a pause that doubles each time. The caller holds m.mu.
func (m *Monitor) postpone() {
	m.due = m.cfg.Now().Add(m.cfg.Every * time.Duration(min(1<<min(m.tries, 16), mostPause)))
	m.tries++
}

// Check takes a root back that is out or read-only, when an attempt is due and every operation that was given up has
// ended.
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

// Reopen takes a root back that is out or read-only, in these steps. Each postpones the next attempt when it fails.
//
//  1. Every operation that was given up has ended; the caller checks that. So nothing that began before takes effect
//     late: no rename to a name that is in use again, no write.
//  2. The directory is one to continue with: see [Root].Probe.
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

// State is what a root is used for.
type State uint32

const (
	// In is used for everything.
	In State = iota
	// Full has met the end of its file system. It takes stores only in the place of what it evicts, and only when no other
	// root takes them.
	Full
	// ReadOnly takes no stores.
	ReadOnly
	// Out is used for nothing: lookups miss, and no operation is begun. It is probed, and returns.
	Out
	// Returning is as Out, but operations are begun: the root is brought up to date.
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
	// ErrOut says that a root is out of service.
	ErrOut = errors.New("store: root is out of service")
	// ErrProbe says that a probe read back other bytes than it wrote.
	ErrProbe = errors.New("store: a probe reads back as something else")
	// ErrNoParent says that the directory in which a root is to be made is missing.
	ErrNoParent = errors.New("its parent directory does not exist")
	// ErrNotMounted says that a root is on the file system of /, which its require_mount forbids.
	ErrNotMounted = errors.New("it is on the file system of /")
)

// Hung says that an operation gave no answer within its limit.
func Hung(err error) bool { return errors.Is(err, staging.ErrHung) }
