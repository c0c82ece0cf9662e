package budget

import (
	"sync"
	"time"
)

// pace keeps a tenant among others to half of the processors: what its messages take beyond that its sessions make up for
// by not reading. Then the next ones wait in the tenant's own connections, and not among the host's goroutines, where those of
// others would queue behind them. A tenant that is alone has all.
type pace struct {
	mu      sync.Mutex
	tenants map[uint32]*paced
	last    *paced    // of the message that came last
	lastAt  time.Time // when that was
	otherAt time.Time // when one of another tenant came before
}

// paced is a tenant, and the time that its messages have taken beyond its part of the processors.
type paced struct {
	id       uint32
	sessions int
	debt     time.Duration
	at       time.Time
}

const (
	paceWindow = 100 * time.Millisecond // a tenant that sends nothing for so long is not among others
	paceFree   = time.Millisecond       // of debt is not made up for
)

// spentOn is the time of processors that a message of a weight has used that took some to handle: its transport takes about 3 ns a
// byte, and a handling that took longer than its weight explains has waited, for a processor or for a disk.
func spentOn(weight int64, took time.Duration) time.Duration {
	return 20*time.Microsecond + time.Duration(3*weight) + min(took, 50*time.Microsecond+time.Duration(10*weight))
}

// enter counts a session of a tenant.
func (p *pace) enter(tenant uint32) *paced {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tenants == nil {
		p.tenants = map[uint32]*paced{}
	}
	t := p.tenants[tenant]
	if t == nil {
		t = &paced{id: tenant, at: time.Now()}
		p.tenants[tenant] = t
	}
	t.sessions++
	return t
}

func (p *pace) leave(t *paced) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.sessions--; t.sessions == 0 {
		delete(p.tenants, t.id)
	}
}

// spent enters the time that a message has taken, and says for how long its session is not to read the next one.
func (p *pace) spent(t *paced, took time.Duration, now time.Time, processors float64) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != t {
		p.last, p.otherAt = t, p.lastAt
	}
	p.lastAt = now
	part := processors / 2
	t.debt = max(0, t.debt-time.Duration(float64(now.Sub(t.at))*part))
	if t.at = now; now.Sub(p.otherAt) > paceWindow {
		return 0
	}
	t.debt += took
	return time.Duration(float64(max(0, t.debt-paceFree)) / part)
}
