// Package payload generates the pages of replays and measurements. All bytes of a page follow from its seed, so a loaded page
// can be checked without storing a copy.
//
// The gain of a codec depends on the content: random bytes gain nothing, and zeros gain everything. So there are also pages of
// values from a normal distribution, in the floats that engines use.
package payload
