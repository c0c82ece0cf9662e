package store

import "testing"

// TestRequestBounds: requests that never end are forgotten beyond the bounds.
func TestRequestBounds(t *testing.T) {
	q := newTouchRecord()
	for request := range uint32(maxRequests + 10) {
		q.Keep(request+1, &touchLog{any: true}, make([]grant, 3))
	}
	if len(q.seen) != maxRequests || q.kept != 3*maxRequests {
		t.Errorf("%d requests with %d touches are kept", len(q.seen), q.kept)
	}
	q.Keep(1<<31, &touchLog{any: true}, make([]grant, maxTouches-100))
	if q.kept > maxTouches {
		t.Errorf("%d touches are kept", q.kept)
	}
}
