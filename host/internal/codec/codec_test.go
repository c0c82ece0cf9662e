package codec

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// bfloat16 fills b with values of a normal distribution as 16-bit floats: the upper halves of 32-bit ones.
func bfloat16(r *rand.Rand, b []byte, scale float64) {
	for i := 0; i+1 < len(b); i += 2 {
		v := math.Float32bits(float32(r.NormFloat64()*scale)) + 0x8000
		b[i], b[i+1] = byte(v>>16), byte(v>>24)
	}
}

// e4m3 fills b with values of a normal distribution as 8-bit floats: sign, 4 bits of exponent, 3 of mantissa.
func e4m3(r *rand.Rand, b []byte, scale float64) {
	for i := range b {
		v := r.NormFloat64() * scale
		frac, exp := math.Frexp(math.Abs(v)) // frac in [0.5, 1)
		e := min(max(exp-1+7, 0), 15)
		b[i] = byte(e<<3) | byte(int((frac*2-1)*8)&7)
		if math.Signbit(v) {
			b[i] |= 0x80
		}
	}
}

// samples are extents of many kinds.
func samples(r *rand.Rand) map[string][]byte {
	make2 := func(n int, fill func(b []byte)) []byte { b := make([]byte, n); fill(b); return b }
	random := func(b []byte) {
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
	list := map[string][]byte{
		"zeros":          make([]byte, MaxBytes),
		"two values":     make2(MaxBytes, func(b []byte) { b[17] = 1 }),
		"random":         make2(MaxBytes, random),
		"bf16":           make2(MaxBytes, func(b []byte) { bfloat16(r, b, 1) }),
		"bf16, odd":      make2(MaxBytes-1, func(b []byte) { bfloat16(r, b, 1) }),
		"fp8":            make2(MaxBytes, func(b []byte) { e4m3(r, b, 1) }),
		"text":           bytes.Repeat([]byte("a block of a chunk, "), 500),
		"half of zeros":  make2(MaxBytes, func(b []byte) { bfloat16(r, b[:len(b)/2], 1) }),
		"constant plane": make2(MaxBytes, func(b []byte) { bfloat16(r, b, 1e-3); every(b[1:], 0x3c) }),
	}
	for _, n := range []int{1, 2, 3, 11, 12, 13, 63, 64, 65, 127, 128, 129, 130, 255, 1000, 4096, 8191, 16385} {
		list[fmt.Sprintf("bf16, %d bytes", n)] = make2(n, func(b []byte) { bfloat16(r, b, 1) })
	}
	return list
}

// every sets every second byte of b.
func every(b []byte, v byte) {
	for i := 0; i < len(b); i += 2 {
		b[i] = v
	}
}

func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for name, extent := range samples(r) {
		for _, element := range []int{1, 2} {
			stored := make([]byte, len(extent)+8)
			every(stored, 0xa5)
			room := stored[:len(extent)]
			n, by := Encode(room, extent, element)
			if n < 1 || n > len(extent) || (by == Raw) != (n == len(extent)) || !Known(by) {
				t.Errorf("%s: %d of %d bytes by codec %d", name, n, len(extent), by)
				continue
			}
			if by != Raw && len(extent)-n < len(extent)>>minGain {
				t.Errorf("%s: codec %d gains %d of %d bytes, less than it must", name, by, len(extent)-n, len(extent))
			}
			got := bytes.Repeat([]byte{0x5a}, len(extent)+8)
			if err := Decode(got[:len(extent)], stored[:n], by); err != nil {
				t.Errorf("%s, elements of %d: %v", name, element, err)
			}
			if !bytes.Equal(got[:len(extent)], extent) {
				t.Errorf("%s, elements of %d: the decoded bytes differ", name, element)
			}
			if !bytes.Equal(got[len(extent):], bytes.Repeat([]byte{0x5a}, 8)) {
				t.Errorf("%s: bytes after the destination were written", name)
			}
		}
	}
}

// What gains is what the package is for: these ratios must not get worse unseen.
func TestRatio(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct {
		name    string
		fill    func(b []byte)
		element int
		want    float64
	}{
		{"bf16", func(b []byte) { bfloat16(r, b, 1) }, 2, 1.44},
		{"fp8 e4m3", func(b []byte) { e4m3(r, b, 1) }, 1, 1.12},
		{"zeros", func([]byte) {}, 2, 8000},
	} {
		extent, stored := make([]byte, MaxBytes), make([]byte, MaxBytes)
		c.fill(extent)
		n, _ := Encode(stored, extent, c.element)
		if ratio := float64(len(extent)) / float64(n); ratio < c.want {
			t.Errorf("%s: ratio %.3f, want at least %.3f", c.name, ratio, c.want)
		} else {
			t.Logf("%s: ratio %.3f", c.name, ratio)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	extent, stored := make([]byte, MaxBytes), make([]byte, MaxBytes)
	bfloat16(r, extent, 1)
	n, by := Encode(stored, extent, 2)
	if by != Planes {
		t.Fatalf("codec %d, want %d", by, Planes)
	}
	good := stored[:n]
	changed := func(at int, v byte) []byte { b := bytes.Clone(good); b[at] = v; return b }
	dst := make([]byte, MaxBytes)
	for _, c := range []struct {
		what string
		dst  []byte
		src  []byte
		by   Codec
	}{
		{"an unknown codec", dst, good, codecs},
		{"an empty extent", dst[:0], good, by},
		{"an extent that is too long", make([]byte, MaxBytes+1), good, by},
		{"a raw extent of another length", dst, good, Raw},
		{"nothing as one plane", dst, nil, Huffman},
		{"nothing as two planes", dst, nil, Planes},
		{"another extent length", dst[:MaxBytes-2], good, by},
		{"a first plane that ends behind the extent", dst, changed(5, 0xff), by},
		{"a method that is not known", dst, changed(1, 9), by},
		{"a repeated byte that is many", dst, changed(1, planeRepeated), by},
		{"codes that are called raw", dst, changed(1, planeRaw), by},
		{"raw bytes that are called codes", dst, changed(0, planeHuffman), by},
		{"a stored form that is cut", dst, good[:n-100], by},
		{"one plane's codec for two", dst, good, Huffman},
	} {
		if err := Decode(c.dst, c.src, c.by); !errors.Is(err, ErrCorrupt) {
			t.Errorf("decoding %s: got %v, want %v", c.what, err, ErrCorrupt)
		}
	}
	if err := Decode(dst, good, by); err != nil || !bytes.Equal(dst, extent) {
		t.Errorf("the extent after what was refused: %v", err)
	}
}

// An encoder and a decoder hold nothing from call to call that could change what the next one does.
func TestFormIsTheSameEachTime(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	list := samples(r)
	first := map[string][]byte{}
	for range 3 {
		for name, extent := range list {
			stored := make([]byte, len(extent))
			n, _ := Encode(stored, extent, 2)
			if was, ok := first[name]; ok && !bytes.Equal(was, stored[:n]) {
				t.Fatalf("%s: its stored form differs from the one before", name)
			}
			first[name] = stored[:n]
		}
	}
}

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
