package codec

import "math"

// A plane of mantissas is as good as random: encoding it would take most of the time and gain nothing. A sample reveals such a
// plane.
const (
	sampleBytes = 4096
	sampleRuns  = 8
)

// sampleCost is the cost in bits of a byte value by its number of occurrences in a sample, relative to the cost if all values
// were equally frequent.
var sampleCost = func() (t [sampleBytes + 1]float32) {
	for n := 1; n <= sampleBytes; n++ {
		t[n] = float32(float64(n) * math.Log2(sampleBytes/float64(n)))
	}
	return t
}()

// uniformBits is the entropy of a sample from which its plane counts as uniform, since codes would gain less than a fiftieth. A
// sample of 4,096 random bytes has 7.95 to 7.96 bits per byte.
const uniformBits = 7.85 * sampleBytes

// uniform reports whether all byte values of a plane are about equally frequent.
func uniform(plane []byte) bool {
	if len(plane) < 2*sampleBytes {
		return false
	}
	var count [4][256]uint16
	const run = sampleBytes / sampleRuns
	for i := range sampleRuns {
		at := (len(plane) - run) / (sampleRuns - 1) * i
		for p := plane[at : at+run]; len(p) >= 4; p = p[4:] {
			count[0][p[0]]++
			count[1][p[1]]++
			count[2][p[2]]++
			count[3][p[3]]++
		}
	}
	var bits float32
	for i := range count[0] {
		bits += sampleCost[count[0][i]+count[1][i]+count[2][i]+count[3][i]]
	}
	return bits > uniformBits
}
