package store

import "sync"

// grant is an entry that a lookup found.
type grant struct {
	Fingerprint uint64
	Slot        uint32
	Root        uint32 // by its place in the configuration
}

// touchRecord is what the requests that have not ended have touched: the evict policy gets one TOUCH per request and entry,
// however often the request asks again. It is safe for concurrent use; its locks are taken with no other one held and nothing
// is called under them.
type touchRecord struct {
	mu   sync.Mutex
	seen map[uint32]*touches
	kept int // grants in all of seen
}

// A client may never end its requests, or use one number for all of them. Beyond these bounds requests are forgotten,
// in no order. A forgotten request touches its entries once more; it costs nothing else.
const (
	maxRequests = 1 << 14
	maxTouches  = 1 << 22 // 64 MiB
)

// touches are the entries that one request has touched.
type touches struct {
	mu      sync.Mutex
	list    []grant             // in order of touch; only appended to
	set     map[uint64]struct{} // fingerprints of list[:indexed]; nil until the order does not tell
	indexed int
}

// touchLog is a lookup's part of a record: what its request had touched before, and what it touches itself.
type touchLog struct {
	before []grant
	of     *touches // nil: the request has touched nothing yet
	any    bool     // this lookup touched something for the first time
	fresh  []uint32 // which of its keys, where of is not nil
}

// Begin begins a lookup's log.
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

// Keep records what a lookup with these grants has touched for the first time. The grants are not changed any more.
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
	case l.of == nil: // two lookups were the first at once
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

// Len is how many requests are remembered, and how many touches of theirs.
func (q *touchRecord) Len() (requests, touches int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.seen), q.kept
}

// forgetOne makes room for a request. The caller holds q.mu.
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

// Has says whether the i-th key of a lookup was touched before. An engine that asks again mostly asks for the same keys
// in the same order, so a key's own place is looked at first.
func (l *touchLog) Has(i int, fp uint64) bool {
	if l.of == nil {
		return false
	}
	return i < len(l.before) && l.before[i].Fingerprint == fp || l.of.has(fp)
}

// touch notes that the lookup touches its i-th key for the first time.
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
