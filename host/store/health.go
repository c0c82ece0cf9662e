package store

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// RootState is what a root is used for at present.
type RootState uint32

const (
	// RootIn is used for everything.
	RootIn RootState = iota
	// RootFull has met the end of its file system: it takes stores only in the place of what it evicts, and only when no
	// other root takes them.
	RootFull
	// RootReadOnly takes no stores.
	RootReadOnly
	// RootOut is used for nothing: lookups miss, and no operation is begun there. It is probed, and comes back.
	RootOut
	returning // as RootOut, but the store's own operations are begun
)

func (s RootState) String() string {
	switch s {
	case RootFull:
		return "full"
	case RootReadOnly:
		return "read-only"
	case RootOut, returning:
		return "out"
	}
	return "in"
}

// health is what a root's operations have told of it.
type health struct {
	state   atomic.Uint32 // a RootState
	outages atomic.Uint32 // times that it came back: what was not synced before may be lost

	mu       sync.Mutex
	reason   string
	since    time.Time
	taken    uint64 // times that it was taken out
	errors   float64
	counted  time.Time // when errors was right
	tries    int       // probes in vain
	due      time.Time // of the next probe
	suspects []mark    // entries whose files gave no answer
}

const (
	// tolerated is how many errors of a device take its root out. They are forgotten one by one.
	tolerated   = 8
	forgetAfter = 5 * time.Second
	maxPause    = 64 // between probes, in Config.UpkeepEvery
)

func (r *root) state() RootState { return RootState(r.health.state.Load()) }

// serves says whether loads are to be had from the root.
func (r *root) serving() bool { return r.state() <= RootReadOnly }

// takes says whether stores can go to the root.
func (r *root) takes() bool { return r.state() <= RootFull }

// invites says whether stores should go to the root.
func (r *root) invites() bool { return r.state() == RootIn && r.budget.easy(r.store.cfg.Now()) }

// admits is asked before each operation on the root's files.
func (r *root) admits(staging.Op) error {
	if r.state() == RootOut {
		return r.outError()
	}
	return nil
}

func (r *root) outError() error {
	h := &r.health
	h.mu.Lock()
	defer h.mu.Unlock()
	return fmt.Errorf("%w: %s since %s: %s", ErrRootOut, r.dir, h.since.Format(time.TimeOnly), h.reason)
}

// saw is told of each operation that failed.
func (r *root) saw(op staging.Op, name string, err error) {
	switch {
	case errors.Is(err, staging.ErrHung):
		r.takeOut("it gives no answer", err, "look after the device or the mount")
	case errors.Is(err, unix.EROFS):
		r.demote(RootReadOnly, "its file system is read-only", err, "find out why, remount it for writing")
	case isDeviceError(err) && r.tooMany():
		r.takeOut("it fails again and again", err, "look after the device, see the kernel's log")
	}
}

// isDeviceError says that an error is about what is under the file system, or the way to it.
func isDeviceError(err error) bool {
	for _, e := range [...]unix.Errno{
		unix.EIO, unix.ENXIO, unix.ENODEV, unix.ENOTCONN, unix.ESHUTDOWN, unix.EHOSTDOWN, unix.EREMOTEIO, unix.ETIMEDOUT, unix.EUCLEAN,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (r *root) tooMany() bool {
	h := &r.health
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	h.errors = max(0, h.errors-now.Sub(h.counted).Seconds()/forgetAfter.Seconds()) + 1
	h.counted = now
	return h.errors >= tolerated
}

// takeOut ends the root's service until a probe says that it can go on.
func (r *root) takeOut(reason string, cause error, advice string) {
	h := &r.health
	h.mu.Lock()
	was := r.state()
	if was == RootOut {
		h.mu.Unlock()
		return
	}
	h.state.Store(uint32(RootOut))
	h.reason = fmt.Sprintf("%s (%v)", reason, cause)
	h.errors = 0
	if was != returning {
		h.since = time.Now()
		h.taken++
	}
	h.postpone(r.store.cfg.UpkeepEvery)
	h.mu.Unlock()
	if was != returning {
		r.log.Error("root taken out of service: its entries miss, stores go elsewhere; it is probed and comes back by itself",
			"reason", reason, "error", cause, "advice", advice)
	}
	r.wake() // who waits for room is to wait no more
}

// demote restricts the root to less than it was used for.
func (r *root) demote(to RootState, reason string, cause error, advice string) {
	h := &r.health
	h.mu.Lock()
	if r.state() >= to {
		h.mu.Unlock()
		return
	}
	h.state.Store(uint32(to))
	h.reason, h.since = fmt.Sprintf("%s (%v)", reason, cause), time.Now()
	h.postpone(r.store.cfg.UpkeepEvery)
	h.mu.Unlock()
	r.log.Error("root takes no stores for now", "state", to.String(), "reason", reason, "error", cause, "advice", advice)
}

// postpone puts the next probe off, twice as long each time. mu is held.
func (h *health) postpone(unit time.Duration) {
	h.due = time.Now().Add(unit * time.Duration(min(1<<min(h.tries, 16), maxPause)))
	h.tries++
}

// promote gives the root its service back; false when it was taken out meanwhile.
func (r *root) promote(from, to RootState) bool {
	h := &r.health
	h.mu.Lock()
	if !h.state.CompareAndSwap(uint32(from), uint32(to)) {
		h.mu.Unlock()
		return false
	}
	if to != RootIn {
		h.mu.Unlock()
		return true
	}
	lasted := time.Since(h.since)
	h.reason, h.since, h.tries = "", time.Now(), max(0, h.tries-1) // one that comes and goes is probed more and more seldom
	h.mu.Unlock()
	r.log.Info("root is back in service", "after", lasted.Round(time.Millisecond))
	return true
}

// suspect notes an entry whose file gave no answer. The root is out, so nothing is promised of it; before the root comes
// back, the entry goes.
func (r *root) suspect(m mark) {
	h := &r.health
	h.mu.Lock()
	defer h.mu.Unlock()
	h.suspects = append(h.suspects, m)
}

func (h *health) takeSuspects() []mark {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := h.suspects
	h.suspects = nil
	return list
}

// notOurs says that an error tells nothing of the file that it was met at: the root is out, or was taken out for it.
func (r *root) notOurs(m mark, err error) bool {
	if errors.Is(err, staging.ErrHung) {
		r.suspect(m)
		return true
	}
	return errors.Is(err, ErrRootOut)
}

func isHung(err error) bool { return errors.Is(err, staging.ErrHung) }

// isFull says that a file system, or what it lets this user take of it, is full.
func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
