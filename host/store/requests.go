package store

import "sync"

// requests remembers which entries each request that is under way has touched, so that TOUCH is sent once per request
// and entry however often a request asks again. A first lookup only leaves its grants here; only a second one pays.
type requests struct {
	mu   sync.Mutex
	seen map[uint32]*visits
}

type visits struct {
	grants [][]grant
	prints map[uint64]struct{} // of grants, once somebody asked
}

// maxRequests bounds the memory: a client that never ends its requests makes the host
// forget what some request touched, whichever, and costs it no more.
const maxRequests = 1 << 14

// before gives the entries that a request touched in earlier lookups; nil for none.
func (q *requests) before(request uint32) map[uint64]struct{} {
	if request == 0 {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	v := q.seen[request]
	if v == nil {
		return nil
	}
	if v.prints == nil {
		v.prints = map[uint64]struct{}{}
	}
	for _, list := range v.grants {
		for _, g := range list {
			v.prints[g.print] = struct{}{}
		}
	}
	v.grants = nil
	prints := make(map[uint64]struct{}, len(v.prints))
	for p := range v.prints {
		prints[p] = struct{}{}
	}
	return prints
}

// after records a lookup's grants, which are not changed any more.
func (q *requests) after(request uint32, grants []grant) {
	if request == 0 || len(grants) == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	v := q.seen[request]
	if v == nil {
		if len(q.seen) >= maxRequests {
			for old := range q.seen {
				delete(q.seen, old)
				break
			}
		}
		v = &visits{}
		q.seen[request] = v
	}
	v.grants = append(v.grants, grants)
}

func (q *requests) end(request uint32) {
	q.mu.Lock()
	delete(q.seen, request)
	q.mu.Unlock()
}
