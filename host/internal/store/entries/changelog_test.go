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
		t.Errorf("%+v, %v", got, err)
	}
	if got, _, err = l.Read(0, make([]Change, 0, 1)); err != nil || len(got) != 1 || got[0].Seq != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	for g := range uint32(3) {
		l.Add(Change{Group: 10 + g})
	}
	if _, _, err := l.Read(1, buf); !errors.Is(err, ErrLost) {
		t.Errorf("resumed after a change that was overwritten: %v", err)
	}
	if got, _, err = l.Read(2, buf); err != nil || len(got) != 4 || got[0].Seq != 3 || got[3].Seq != 6 {
		t.Errorf("%+v, %v", got, err)
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
