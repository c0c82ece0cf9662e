package store

import "sync"

// requests remembers which entries each request has touched, so that the evict policy gets one TOUCH per request and
// entry, however often the request asks again.
type requests struct {
	mu   sync.Mutex
	seen map[uint32]*requestTouches
	kept int // grants in all of seen
}

// A client may never end its requests, or use one number for all of them. Beyond these bounds requests are forgotten,
// in no order. A forgotten request touches its entries once more; it costs nothing else.
const (
	maxRequests = 1 << 14
	maxTouches  = 1 << 22 // 64 MiB
)

// requestTouches are the entries that one request has touched.
type requestTouches struct {
	mu      sync.Mutex
	list    []grant             // in order of touch; only appended to
	set     map[uint64]struct{} // fingerprints of list[:indexed]; nil until the order does not tell
	indexed int
}

// touchLog is a lookup's part of them: what its request had touched before, and what it touches itself.
type touchLog struct {
	before []grant
	of     *requestTouches // nil: the request has touched nothing yet
	any    bool            // this lookup touched something for the first time
	fresh  []uint32        // which of its keys, where of is not nil
}

// log begins a lookup's.
func (q *requests) log(request uint32) touchLog {
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

// keep records what a lookup with these grants has touched for the first time. The grants are not changed any more.
func (q *requests) keep(request uint32, l *touchLog, grants []grant) {
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
		q.seen[request] = &requestTouches{list: grants}
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

// forgetOne makes room for a request. The caller holds q.mu.
func (q *requests) forgetOne() {
	for request := range q.seen {
		q.forget(request)
		return
	}
}

func (q *requests) forget(request uint32) {
	if t := q.seen[request]; t != nil {
		q.kept -= len(t.list)
		delete(q.seen, request)
	}
}

func (q *requests) end(request uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.forget(request)
}

// has says whether the i-th key of a lookup was touched before. An engine that asks again mostly asks for the same keys
// in the same order, so a key's own place is looked at first.
func (l *touchLog) has(i int, fp uint64) bool {
	if l.of == nil {
		return false
	}
	return i < len(l.before) && l.before[i].fp == fp || l.of.has(fp)
}

// touch notes that the lookup touches its i-th key for the first time.
func (l *touchLog) touch(i int) {
	l.any = true
	if l.of != nil {
		l.fresh = append(l.fresh, uint32(i))
	}
}

func (t *requestTouches) add(grants []grant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = append(t.list, grants...)
}

func (t *requestTouches) has(fp uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.set == nil {
		t.set = make(map[uint64]struct{}, len(t.list))
	}
	for ; t.indexed < len(t.list); t.indexed++ {
		t.set[t.list[t.indexed].fp] = struct{}{}
	}
	_, ok := t.set[fp]
	return ok
}
