package index

import (
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

// An index that is raised finds what it had, and takes more.
func TestRaise(t *testing.T) {
	key := func(n uint32) *kv.Key { return &kv.Key{byte(n), byte(n >> 8), byte(n >> 16), 1} }
	print := func(n uint32) uint64 { return uint64(n+1) * 0x9e3779b97f4a7c15 }
	x := New(4, func(_ uint16, k kv.Key) uint64 {
		return print(uint32(k[0]) | uint32(k[1])<<8 | uint32(k[2])<<16)
	}, func(class uint16) uint16 { return class })
	add := func(n uint32) bool { return x.Add(print(n), Owner{}, key(n), 0, 0) != None }
	for n := range uint32(4) {
		if !add(n) {
			t.Fatal(n)
		}
	}
	if add(4) {
		t.Fatal("a fifth entry of four")
	}
	reach := x.Reach()
	x.Raise(5000)
	x.Raise(100) // it never gets smaller
	if x.Max() != 5000 || x.Reach() != reach {
		t.Fatalf("%d entries at most, and %d after more raising, %d before", x.Max(), x.Reach(), reach)
	}
	for n := uint32(4); n < 5000; n++ {
		if !add(n) {
			t.Fatal(n)
		}
	}
	for n := range uint32(5000) {
		if x.Find(print(n), 0, key(n)) == None {
			t.Fatalf("%d is lost", n)
		}
	}
	if x.Raise(1 << 31); x.Max() != reach {
		t.Errorf("raised to %d, beyond %d", x.Max(), reach)
	}
}
