package files

import (
	"fmt"
	"testing"
	"time"
)

// TestManyOrphans: the check whether a scanned file is an orphan takes no longer when there are many.
func TestManyOrphans(t *testing.T) {
	var l Orphans
	l.init(nil)
	for n := range maxOrphans {
		if !l.add(&Orphan{name: fmt.Sprint("/root/", n)}) {
			t.Fatal("the list is full at", n)
		}
	}
	if l.add(&Orphan{name: "/root/more"}) {
		t.Error("the list has no bound")
	}
	start := time.Now()
	for n := range maxOrphans {
		if !l.Has(fmt.Sprint("/root/", n)) || l.Has(fmt.Sprint("/other/", n)) {
			t.Fatal(n)
		}
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("%d checks took %s", 2*maxOrphans, took)
	}
	for o := l.first(); o != nil; o = l.first() {
		l.deleted(o, nil)
	}
	if len(l.by) > 0 {
		t.Errorf("%d are left", len(l.by))
	}
}
