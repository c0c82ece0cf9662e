package budget

import (
	"sync"
	"time"
)

// pace limits a tenant to half of the processors while other tenants are active. If messages of the tenant take more, its
// sessions stop reading until the excess is made up for. The next messages then wait in the tenant's own connections. Otherwise
// they would wait among the host's goroutines, and messages of other tenants would queue behind them. A tenant that is alone
// has no limit.
type pace struct {
	mu      sync.Mutex
	tenants map[uint32]*paced
	last    *paced    // tenant of the latest message
	lastAt  time.Time // time of the latest message
	otherAt time.Time // time of the latest message of another tenant
}

// paced is a tenant with its debt: the time that its messages have taken beyond its part of the processors.
type paced struct {
	id       uint32
	sessions int
	debt     time.Duration
	at       time.Time
}

const (
	paceWindow = 100 * time.Millisecond // a tenant counts as active for this time after a message
	paceFree   = time.Millisecond       // debt that is tolerated
)

// spentOn estimates the processor time of a message from its weight and from the time of its handling. The transport takes about 3 ns per
// byte. Handling that took longer than the weight explains has waited for a processor or for a disk, and the excess is not counted.
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

// spent adds the time that a message has taken, and returns the time for which its session must not read the next one.
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
