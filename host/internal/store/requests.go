package store

import "sync"

// grant is an entry that a lookup found.
type grant struct {
	Fingerprint uint64
	Slot        uint32
	Root        uint32 // position in the configuration
}

// touchRecord remembers the entries that running requests have touched, so that the evict policy gets one TOUCH for each
// request and entry, even if the request looks an entry up several times. It is safe for concurrent use. Its locks are taken
// while no other lock is held, and nothing is called under them.
type touchRecord struct {
	mu   sync.Mutex
	seen map[uint32]*touches
	kept int // number of grants in seen
}

// Limits of a touchRecord. A client may never end its requests, or use one number for all of them. Beyond these limits,
// requests are forgotten in no particular order. The only effect is that a forgotten request touches its entries once more.
const (
	maxRequests = 1 << 14
	maxTouches  = 1 << 22 // 64 MiB
)

// touches are the entries that one request has touched.
type touches struct {
	mu      sync.Mutex
	list    []grant             // in the order of the touches; only appended to
	set     map[uint64]struct{} // fingerprints of list[:indexed]; nil until a lookup differs in order
	indexed int
}

// touchLog is the part of a record that one lookup uses: the earlier touches of its request, and its own.
type touchLog struct {
	before []grant
	of     *touches // nil if the request has touched nothing yet
	any    bool     // this lookup touched something for the first time
	fresh  []uint32 // indexes of these keys; used only if of is not nil
}

// Begin begins the log of a lookup.
func (q *touchRecord) Begin(request uint32) touchLog {
	if request == 0 {
		return touchLog{}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.seen[request]
	if t == nil {
		return touchLog{}
	}
	return touchLog{before: t.list, of: t}
}

// Keep records the entries that a lookup has touched for the first time. The caller must not change grants afterwards.
func (q *touchRecord) Keep(request uint32, l *touchLog, grants []grant) {
	if request == 0 || len(grants) == 0 || !l.any {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.seen[request]
	switch {
	case t == nil:
		if len(q.seen) >= maxRequests {
			q.forgetOne()
		}
		q.seen[request] = &touches{list: grants}
		q.kept += len(grants)
	case l.of == nil: // two lookups were the first of the request at the same time
		t.add(grants)
		q.kept += len(grants)
	default:
		for _, i := range l.fresh {
			t.add(grants[i : i+1])
		}
		q.kept += len(l.fresh)
	}
	for q.kept > maxTouches {
		q.forgetOne()
	}
}

// Len returns the number of remembered requests and of their touches.
func (q *touchRecord) Len() (requests, touches int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.seen), q.kept
}

// forgetOne forgets one request. q.mu must be held.
func (q *touchRecord) forgetOne() {
	for request := range q.seen {
		q.forget(request)
		return
	}
}

func (q *touchRecord) forget(request uint32) {
	if t := q.seen[request]; t != nil {
		q.kept -= len(t.list)
		delete(q.seen, request)
	}
}

func (q *touchRecord) End(request uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.forget(request)
}

// Has reports whether the request has touched the i-th key of the lookup before. An engine that repeats a lookup mostly has the
// same keys in the same order, so the i-th earlier touch is compared first.
func (l *touchLog) Has(i int, fp uint64) bool {
	if l.of == nil {
		return false
	}
	return i < len(l.before) && l.before[i].Fingerprint == fp || l.of.has(fp)
}

// touch records that the lookup touches its i-th key for the first time.
func (l *touchLog) touch(i int) {
	l.any = true
	if l.of != nil {
		l.fresh = append(l.fresh, uint32(i))
	}
}

func (t *touches) add(grants []grant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = append(t.list, grants...)
}

func (t *touches) has(fp uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.set == nil {
		t.set = make(map[uint64]struct{}, len(t.list))
	}
	for ; t.indexed < len(t.list); t.indexed++ {
		t.set[t.list[t.indexed].Fingerprint] = struct{}{}
	}
	_, ok := t.set[fp]
	return ok
}
