package files

import (
	"fmt"
	"testing"
)

// TestOrphansAreBounded: the list takes so many and no more, and nothing is left of those that are gone.
func TestOrphansAreBounded(t *testing.T) {
	var l Orphans
	l.init(nil)
	for n := range maxOrphans {
		if !l.add(&Orphan{name: fmt.Sprint("/root/", n)}) {
			t.Fatalf("the list is full with %d orphans, want room for %d", n, maxOrphans)
		}
	}
	if l.add(&Orphan{name: "/root/more"}) || !l.Has("/root/7") || l.Has("/other/7") {
		t.Error("the list takes one more than its bound, or does not know what it has")
	}
	for o := l.first(); o != nil; o = l.first() {
		l.deleted(o, nil)
	}
	if len(l.by) > 0 {
		t.Errorf("%d names are left of an empty list", len(l.by))
	}
}
