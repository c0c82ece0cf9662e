package shared

import (
	"errors"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// auditEvery is the interval of audits when no host has died.
const auditEvery = time.Hour

// audits are background lists of a whole bucket. A directory needs none.
type audits struct {
	wake func()

	mu sync.Mutex
	audit
}

// audit is one audit.
type audit struct {
	ticket uint64 // ticket of the audit that is due or under way; else 0
	began  time.Duration
	over   bool
	strays []Stray
	last   time.Duration        // when the last audit ended
	judged map[string]time.Time // modification times of the strays already judged in this term, by path; unchanged ones are not read again
}

// Stray is an object of the bucket that is not in the store's index.
type Stray struct {
	Path string
	Info staging.Info
}

// Audit returns the ticket of an audit that is due, or 0.
func (a *audits) Audit() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		return 0
	}
	return a.ticket
}

// Audited reports the strays that a list of the whole bucket has found. The list must have begun after Audit returned the
// ticket.
func (a *audits) Audited(ticket uint64, strays []Stray) {
	a.mu.Lock()
	if a.ticket == ticket {
		judged := a.judged
		a.judged = map[string]time.Time{}
		a.over, a.strays = true, slices.DeleteFunc(strays, func(s Stray) bool {
			at, is := judged[s.Path]
			if is = is && at.Equal(s.Info.ModTime); is {
				a.judged[s.Path] = at
			}
			return is
		})
	}
	a.mu.Unlock()
	a.wake()
}

func (a *audits) reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.audit = audit{}
}

// mostStrays is the maximum number of strays read in one step.
const mostStrays = 64

// audit starts audits, and reads and logs the strays that they find. It then releases the credit of the members that were gone
// long enough before the audit began.
func (b *bucket) audit() error {
	m, t, a := b.m, b.m.term, &b.m.audits
	now := m.cfg.Now()
	a.mu.Lock()
	if a.last == 0 {
		a.last = now
	}
	due := now-a.last > auditEvery || !t.knows
	for _, g := range t.accounts {
		due = due || g.since > 0 && !g.swept && now-g.since > m.cfg.landing()
	}
	if due && a.ticket == 0 && m.active() {
		a.ticket, a.began = max(1, m.cfg.Unique()), now
		m.Wake()
	}
	if !a.over {
		a.mu.Unlock()
		return nil
	}
	part := a.strays[:min(mostStrays, len(a.strays))]
	a.mu.Unlock()
	for i := range part {
		// No object is removed at the same time: only this host removes objects.
		r, err := m.back.Identify(part[i].Path, part[i].Info)
		switch {
		case err == nil:
			m.relay(r, "")
			m.log.Warn("an object was in no account; it is now", "object", part[i].Path)
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, ErrDamaged):
			return err // all strays of this part are read again
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range part {
		a.judged[part[i].Path] = part[i].Info.ModTime
	}
	if a.strays = a.strays[len(part):]; len(part) > 0 {
		m.Wake()
		return nil // the records are logged at the next step
	}
	for _, g := range t.accounts {
		g.swept = g.swept || g.since > 0 && a.began-g.since > m.cfg.landing()
	}
	a.audit, t.knows = audit{last: now, judged: a.judged}, true
	b.cleaned = false // clean up again
	return nil
}
