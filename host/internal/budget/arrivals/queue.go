package arrivals

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"
)

// Queue lets the members of a crowd through to something that few of them may use at a time. Of those that wait, the next is the
// one that has used it least: start-time fair queuing. So a member that needs little hardly waits for those that always ask for
// more, however many they are. One that has waited longest is next after mostPassed turns of others for each that waits, since
// others may have used nothing because they come under new names. The zero value lets one through at a time.
type Queue struct {
	Most int // users at a time; 0 means 1

	mu      sync.Mutex
	users   int
	waiting []*turn
	now     time.Duration // what the latest user had used before
	of      map[string]*member
	kept    int // members after those that are away were forgotten
}

// mostAway is about how many members are remembered that neither use the queue nor wait.
const mostAway = 1 << 10

// mostPassed is large enough for members with uses that are several times as long as those of others.
const mostPassed = 8

// member is what a member has used. A member that comes has used no less than the latest user, but for a moment by which it is
// before all that have used as much.
type member struct {
	used time.Duration
	here int // uses and waits
}

// turn is a wait of a member.
type turn struct {
	*member
	comes  chan struct{} // closed when the member is let through
	passed int           // turns of others while it waited longest
}

// Enter waits until a member is let through. If it returns nil, Leave must follow.
func (q *Queue) Enter(ctx context.Context, who string) error {
	q.mu.Lock()
	m := q.member(who)
	m.here++
	if q.users < max(1, q.Most) {
		q.begin(m)
		q.mu.Unlock()
		return nil
	}
	x := &turn{member: m, comes: make(chan struct{})}
	q.waiting = append(q.waiting, x)
	q.mu.Unlock()
	select {
	case <-x.comes:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	i := slices.Index(q.waiting, x)
	if i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		m.here--
	}
	q.mu.Unlock()
	if i < 0 { // it was let through meanwhile
		q.Leave(who, 0)
	}
	return ctx.Err()
}

// Leave ends a member's use and charges the time that it took.
func (q *Queue) Leave(who string, took time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	m := q.of[who]
	m.used += took
	m.here--
	q.users--
	switch {
	case len(q.waiting) > 0:
		next := slices.MinFunc(q.waiting, func(a, b *turn) int { return cmp.Compare(a.used, b.used) })
		if first := q.waiting[0]; first != next {
			if first.passed++; first.passed > mostPassed*len(q.waiting) {
				next = first
			}
		}
		i := slices.Index(q.waiting, next)
		q.waiting = slices.Delete(q.waiting, i, i+1)
		q.begin(next.member)
		close(next.comes)
	case q.users == 0:
		q.of, q.kept, q.now = nil, 0, 0
	}
}

// Waits reports whether a member waits.
func (q *Queue) Waits() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) > 0
}

// begin lets a member through. The mutex must be held.
func (q *Queue) begin(m *member) {
	q.users++
	q.now = max(q.now, m.used)
}

// member returns the record of a member. The mutex must be held.
func (q *Queue) member(who string) *member {
	if q.of == nil {
		q.of = map[string]*member{}
	} else if len(q.of) >= 2*q.kept+mostAway {
		maps.DeleteFunc(q.of, func(_ string, m *member) bool { return m.here == 0 })
		q.kept = len(q.of)
	}
	m := q.of[who]
	if m == nil {
		m = &member{used: q.now - 1}
		q.of[who] = m
	} else if m.here == 0 {
		m.used = max(m.used, q.now-1)
	}
	return m
}
