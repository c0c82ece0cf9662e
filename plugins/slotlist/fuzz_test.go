package slotlist

import (
	"bytes"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

// FuzzLoad reads saved orders. What is taken can be used and saved again; what is refused leaves an empty list.
func FuzzLoad(f *testing.F) {
	l := New(8)
	for slot := range uint32(5) {
		l.PushFront(slot, 1, slot/2)
	}
	l.Pin(2)
	saved, _ := l.Save(nil, 1<<20)
	f.Add(saved)
	f.Add(saved[:20])
	f.Fuzz(func(t *testing.T, b []byte) {
		l := New(8)
		victims := make([]uint32, 8)
		if l.Load(b) != nil {
			if n := l.Victims(abi.Ask{Bytes: 1 << 30, MaxVictims: 8, Tenant: abi.None}, victims); n != 0 {
				t.Fatalf("%d victims of a list that was refused", n)
			}
			return
		}
		again, ok := l.Save(nil, 1<<20)
		if !ok {
			t.Fatal("it cannot be saved")
		}
		next := New(8)
		if err := next.Load(again); err != nil {
			t.Fatalf("what it saved: %v", err)
		}
		if third, _ := next.Save(nil, 1<<20); !bytes.Equal(third, again) {
			t.Fatal("saved again it is another order")
		}
		n := l.Victims(abi.Ask{Bytes: 1 << 30, MaxVictims: 8, Tenant: abi.None}, victims)
		for i, v := range victims[:n] {
			if v >= 8 {
				t.Fatalf("victim %d", v)
			}
			for _, w := range victims[:i] {
				if v == w {
					t.Fatalf("victim %d twice", v)
				}
			}
		}
		for _, v := range victims[:n] {
			l.Remove(v)
		}
	})
}
