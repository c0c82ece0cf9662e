package codec

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// Any extent comes back as it was.
func FuzzRoundTrip(f *testing.F) {
	for _, extent := range samples(rand.New(rand.NewPCG(1, 2))) {
		f.Add(extent[:min(len(extent), 700)], true)
	}
	f.Fuzz(func(t *testing.T, extent []byte, floats bool) {
		if len(extent) == 0 || len(extent) > MaxBytes {
			return
		}
		element := 1
		if floats {
			element = 2
		}
		stored, got := make([]byte, len(extent)), make([]byte, len(extent))
		n, by := Encode(stored, extent, element)
		testenv.OK(t, Decode(got, stored[:n], by))
		if !bytes.Equal(got, extent) {
			t.Fatal("the decoded bytes differ")
		}
	})
}

// Bytes that no encoder wrote, under a checksum that fits them, may reach a decoder: it returns an error or some bytes,
// and writes nowhere else.
func FuzzDecode(f *testing.F) {
	for _, extent := range samples(rand.New(rand.NewPCG(1, 2))) {
		for element := 1; element <= 2; element++ {
			extent := extent[:min(len(extent), 700)]
			stored := make([]byte, len(extent))
			n, by := Encode(stored, extent, element)
			f.Add(stored[:n], uint8(by), uint16(len(extent)-1))
		}
	}
	f.Fuzz(func(t *testing.T, stored []byte, by uint8, last uint16) {
		const guard = 64
		n := int(last) + 1
		room := bytes.Repeat([]byte{0xa5}, guard+n+guard)
		was := bytes.Clone(stored)
		err := Decode(room[guard:guard+n:guard+n], stored, Codec(by))
		if err != nil && !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%v is not %v", err, ErrCorrupt)
		}
		if !bytes.Equal(stored, was) {
			t.Fatal("the stored bytes were changed")
		}
		for i := range guard {
			if room[i] != 0xa5 || room[guard+n+i] != 0xa5 {
				t.Fatal("bytes beside the destination were written")
			}
		}
	})
}
