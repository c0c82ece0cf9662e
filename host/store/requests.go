package store

import "sync"

// requests remembers which entries each request that is under way has touched, so that TOUCH is sent once per request
// and entry however often a request asks again. A first lookup only leaves its grants here.
type requests struct {
	mu   sync.Mutex
	seen map[uint32]visits
}

// visits are a request's lookups that touched something, by their grants, which are not changed any more.
type visits [][]grant

// maxRequests bounds the memory: a client that never ends its requests makes the host
// forget what some request touched, whichever, and costs it no more.
const maxRequests = 1 << 14

// before gives a request's earlier lookups.
func (q *requests) before(request uint32) visited {
	if request == 0 {
		return visited{}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return visited{lists: q.seen[request]}
}

// after records a lookup's grants.
func (q *requests) after(request uint32, grants []grant) {
	if request == 0 || len(grants) == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.seen[request] == nil && len(q.seen) >= maxRequests {
		for old := range q.seen {
			delete(q.seen, old)
			break
		}
	}
	q.seen[request] = append(q.seen[request], grants)
}

// visited answers what a request has touched. An engine that asks again mostly asks for the same keys in the same order, so
// a key's own place is looked at first; the set of all is made when that does not tell.
type visited struct {
	lists visits
	all   map[uint64]struct{}
}

// has says whether the i-th key of a lookup was touched before.
func (v *visited) has(i int, print uint64) bool {
	if len(v.lists) == 0 {
		return false
	}
	for _, list := range v.lists {
		if i < len(list) && list[i].print == print {
			return true
		}
	}
	if v.all == nil {
		v.all = map[uint64]struct{}{}
		for _, list := range v.lists {
			for _, g := range list {
				v.all[g.print] = struct{}{}
			}
		}
	}
	_, ok := v.all[print]
	return ok
}

func (q *requests) end(request uint32) {
	q.mu.Lock()
	delete(q.seen, request)
	q.mu.Unlock()
}
