//go:build !race

package testenv

// RaceDetector says whether the tests run under the race detector.
const RaceDetector = false
