package budget

import (
	"strconv"
	"testing"
)

// closed says whether a connection was closed.
type closed bool

func (c *closed) Close() error { *c = true; return nil }

// A client that opens connection after connection pushes out its own, the first ones first, and never another's: what that
// has sent may not have been read yet.
func TestCrowdsPushOutTheirOwn(t *testing.T) {
	const most = 8
	open := &Connections{Of: "connections", Max: most}
	var other, first closed
	open.Add(&other, "other")
	open.Add(&first, "crowd")
	for range most - 2 {
		open.Add(new(closed), "crowd")
	}
	if first {
		t.Fatal("the first connection is closed while there is room, want it open")
	}
	for range 3 * most {
		open.Add(new(closed), "crowd")
	}
	if n := open.Figures().Held; !bool(first) || bool(other) || n != most {
		t.Errorf("%d are open, want %d; the crowd's first was closed: %t, the other client's: %t", n, most, first, other)
	}
	for i := range 2 * most { // a crowd of clients cannot keep it full either
		open.Add(new(closed), strconv.Itoa(i))
	}
	if f := open.Figures(); f.Held != most || f.Refused != 5*most {
		t.Errorf("after crowds the figures are %+v, want %d open and %d closed for others", f, most, 5*most)
	}
}
