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
	c := NewCopies()
	want := func(what string, got, want bool) {
		t.Helper()
		if got != want {
			t.Errorf("%s: first or last copy is %v, want %v", what, got, want)
		}
	}
	want("an entry that is not counted comes", c.add(1), true)
	want("it goes", c.remove(1), true)
	c.add(1)
	c.Watch(1)
	want("a second copy", c.add(1), false)
	c.Unwatch(1)
	want("the first copy goes", c.remove(1), false)
	want("the last one goes", c.remove(1), true)
	if len(c.of) != 0 {
		t.Errorf("%d entries are still counted", len(c.of))
	}
	c.add(2)
	c.Watch(2)
	want("the only copy goes while another is made", c.remove(2), true)
	want("the other is there", c.add(2), true)
	c.Unwatch(2)
	want("it goes, too", c.remove(2), true)
	if len(c.of) != 0 {
		t.Errorf("%d entries are still counted", len(c.of))
	}
}
