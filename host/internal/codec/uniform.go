package codec

import "math"

// A plane of mantissas is as good as random: coding it would cost most of the time and gain nothing. A sample tells.
const (
	sampleBytes = 4096
	sampleRuns  = 8
)

// sampleCost is what one byte value that occurs so many times in a sample costs, in bits, less what it would cost if all
// values were as frequent.
var sampleCost = func() (t [sampleBytes + 1]float32) {
	for n := 1; n <= sampleBytes; n++ {
		t[n] = float32(float64(n) * math.Log2(sampleBytes/float64(n)))
	}
	return t
}()

// uniformBits is the entropy of a sample from which on its plane counts as uniform: what codes gain is less than a fiftieth.
// A sample of 4,096 random bytes has 7.95 to 7.96 bits for each.
const uniformBits = 7.85 * sampleBytes

// uniform says that the values of a plane are about as frequent as each other.
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
