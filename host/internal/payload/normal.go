package payload

import (
	"math"
	"sync"
)

// quantiles returns equally likely values of a normal distribution: the middles of 65,536 parts of equal weight, rounded to a
// type of floats.
func quantiles[F uint8 | uint16](round func(float64) F) *[1 << 16]F {
	var t [1 << 16]F
	for i := range t {
		t[i] = round(math.Sqrt2 * math.Erfinv(2*(float64(i)+0.5)/float64(len(t))-1))
	}
	return &t
}

var (
	bfloat16s = sync.OnceValue(func() *[1 << 16]uint16 { return quantiles(bfloat16) })
	float8s   = sync.OnceValue(func() *[1 << 16]uint8 { return quantiles(e4m3) })
)

// bfloat16 rounds to the nearest value, and to the even one of two equally near values.
func bfloat16(v float64) uint16 {
	bits := math.Float32bits(float32(v))
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// e4m3 rounds to the nearest value of 8 bits, and to the even one of two equally near values. The format has a sign, 4 bits of
// exponent and 3 bits of mantissa, as in OCP's 8-bit floating point specification. v must be far from its limit, 448.
func e4m3(v float64) (bits uint8) {
	const least = -6  // exponent of the least normal value
	exponent := least // also the exponent of 0
	if _, e := math.Frexp(v); v != 0 {
		exponent = max(e-1, least)
	}
	bits = uint8((exponent-least)*8 + int(math.RoundToEven(math.Abs(math.Ldexp(v, 3-exponent)))))
	if math.Signbit(v) {
		bits |= 0x80
	}
	return bits
}

// bfloat16Words returns words of four values.
func bfloat16Words() words {
	t := bfloat16s()
	return func(c uint64) uint64 {
		w := mix(c)
		return uint64(t[uint16(w)]) | uint64(t[uint16(w>>16)])<<16 | uint64(t[uint16(w>>32)])<<32 | uint64(t[w>>48])<<48
	}
}

// float8Words returns words of eight values.
func float8Words() words {
	t := float8s()
	four := func(w uint64) uint64 {
		return uint64(t[uint16(w)]) | uint64(t[uint16(w>>16)])<<8 | uint64(t[uint16(w>>32)])<<16 | uint64(t[w>>48])<<24
	}
	return func(c uint64) uint64 { return four(mix(c)) | four(mix(^c))<<32 }
}
