package socket

import "testing"

// closed says whether a connection was closed.
type closed bool

func (c *closed) Close() error { *c = true; return nil }

// A process that opens connection after connection pushes out its own, the first ones first, and never another's: what
// that has sent may not have been read yet.
func TestCrowdsPushOutTheirOwn(t *testing.T) {
	var open connections
	var other, first closed
	open.add(&other, 7)
	open.add(&first, 8)
	for range MaxDescriptorConns - 2 {
		open.add(new(closed), 8)
	}
	if first {
		t.Fatal("closed while there was room")
	}
	for range 3 * MaxDescriptorConns {
		open.add(new(closed), 8)
	}
	if !first || other || open.list.Len() != MaxDescriptorConns {
		t.Errorf("%d are open; the crowd's first was closed: %t, the other process's: %t", open.list.Len(), first, other)
	}
	for pid := range int32(2 * MaxDescriptorConns) { // a crowd of processes cannot keep it full either
		open.add(new(closed), 100+pid)
	}
	if n := open.list.Len(); n != MaxDescriptorConns {
		t.Errorf("%d are open", n)
	}
}
