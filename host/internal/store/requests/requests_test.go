package requests

import "testing"

// TestRequestBounds: requests that never end are forgotten beyond the bounds.
func TestRequestBounds(t *testing.T) {
	q := NewRecord()
	for request := range uint32(maxRequests + 10) {
		q.Keep(request+1, &Log{any: true}, make([]Grant, 3))
	}
	if len(q.seen) != maxRequests || q.kept != 3*maxRequests {
		t.Errorf("%d requests with %d touches are kept", len(q.seen), q.kept)
	}
	q.Keep(1<<31, &Log{any: true}, make([]Grant, maxTouches-100))
	if q.kept > maxTouches {
		t.Errorf("%d touches are kept", q.kept)
	}
}
