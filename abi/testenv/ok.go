package testenv

import "testing"

// OK ends the test at an error: of what a test needs, and does not look at.
func OK(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// NoError fails the test at an error of what it looks at, and goes on.
func NoError(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}

// Fill fills b with what follows from a seed, and looks random. The race detector would take longer for each byte than to make it.
//
//go:norace
func Fill(b []byte, seed uint64) {
	for ; len(b) > 0; b = b[min(8, len(b)):] {
		seed += 0x9e3779b97f4a7c15
		z := (seed ^ seed>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		for i := range min(8, len(b)) {
			b[i] = byte(z >> (8 * i))
		}
	}
}
