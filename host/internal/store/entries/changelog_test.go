package entries

import (
	"errors"
	"testing"
)

func TestLog(t *testing.T) {
	l := NewChangeLog(4)
	l.Add(Change{Group: 1}) // not recorded: nobody reads
	if _, _, err := l.Read(0, nil); l.On() || !errors.Is(err, ErrLost) {
		t.Fatalf("before Start: %v", err)
	}
	if at := l.Start(); at != 0 || !l.On() {
		t.Fatalf("starts at %d", at)
	}
	buf := make([]Change, 0, 8)
	got, wake, err := l.Read(0, buf)
	if err != nil || len(got) != 0 {
		t.Fatal(got, err)
	}
	for g := range uint32(3) {
		l.Add(Change{Kind: Stored, Group: g})
	}
	<-wake
	if got, _, err = l.Read(1, buf); err != nil || len(got) != 2 || got[0].Seq != 2 || got[1].Group != 2 {
		t.Errorf("changes after 1: %+v, error %v, want those of groups 1 and 2", got, err)
	}
	if got, _, err = l.Read(0, make([]Change, 0, 1)); err != nil || len(got) != 1 || got[0].Seq != 1 {
		t.Errorf("one change after 0: %+v, error %v, want number 1", got, err)
	}
	for g := range uint32(3) {
		l.Add(Change{Group: 10 + g})
	}
	if _, _, err := l.Read(1, buf); !errors.Is(err, ErrLost) {
		t.Errorf("resumed after a change that was overwritten: %v", err)
	}
	if got, _, err = l.Read(2, buf); err != nil || len(got) != 4 || got[0].Seq != 3 || got[3].Seq != 6 {
		t.Errorf("changes after 2: %+v, error %v, want numbers 3 to 6", got, err)
	}
	if _, _, err := l.Read(7, buf); !errors.Is(err, ErrLost) {
		t.Errorf("resumed after a change that was never made: %v", err)
	}
	_, wake, _ = l.Read(6, buf)
	l.Reset()
	<-wake
	if _, _, err := l.Read(6, buf); !errors.Is(err, ErrLost) {
		t.Errorf("resumed across a reset: %v", err)
	}
	if got, _, err = l.Read(l.Start(), buf); err != nil || len(got) != 0 {
		t.Errorf("after a reset: %+v, %v", got, err)
	}
}

// TestCopies: the first copy and the last one are told to readers, in whatever order copies come and go.
func TestCopies(t *testing.T) {
	c, disk := NewCopies(), &Set{}
	want := func(what string, got, want bool) {
		t.Helper()
		if got != want {
			t.Errorf("%s: first or last copy is %v, want %v", what, got, want)
		}
	}
	want("an entry that is not counted comes", c.add(1, disk), true)
	want("it goes", c.remove(1, disk), true)
	c.add(1, disk)
	c.Watch(1, disk)
	want("a second copy", c.add(1, disk), false)
	c.Unwatch(1)
	want("the first copy goes", c.remove(1, disk), false)
	want("the last one goes", c.remove(1, disk), true)
	if len(c.of) != 0 {
		t.Errorf("%d entries are still counted", len(c.of))
	}
	c.add(2, disk)
	c.Watch(2, disk)
	want("the only copy goes while another is made", c.remove(2, disk), true)
	want("the other is there", c.add(2, disk), true)
	c.Unwatch(2)
	want("it goes, too", c.remove(2, disk), true)
	if len(c.of) != 0 {
		t.Errorf("%d entries are still counted", len(c.of))
	}
}

// TestCopiesAreKept: an entry of memory is kept while another set has a copy.
func TestCopiesAreKept(t *testing.T) {
	c, disk, memory := NewCopies(), &Set{}, &Set{cfg: Config{Volatile: true}}
	kept := func(what string, want int) {
		t.Helper()
		if got := c.Kept(); got != want {
			t.Errorf("%s: %d entries of memory are kept, want %d", what, got, want)
		}
	}
	c.add(1, memory)
	c.Watch(1, memory)
	c.add(1, disk)
	kept("a copy came to the disk", 1)
	c.Unwatch(1)
	kept("nothing moves any more", 1)
	c.remove(1, disk)
	kept("the disk has evicted it", 0)
	c.add(2, disk)
	c.Watch(2, disk)
	c.add(2, memory)
	c.Unwatch(2)
	kept("another one came near", 1)
	c.remove(2, memory)
	kept("it went again", 0)
	c.found(3, copies{complete: 3, volatile: 1})
	kept("two disks have a third one", 1)
	c.remove(3, disk)
	kept("one of them has evicted it", 1)
	c.remove(3, memory)
	kept("only a disk has it", 0)
}
