// Package payload makes the pages of replays and measurements. All bytes of a page follow from its seed, so whoever loads
// it can tell which of them are wrong, and keeps nothing.
//
// What a codec gains depends on the content: bytes that look random gain nothing, and zeros everything. So there are
// pages of values from a normal distribution too, in the floats that engines keep.
package payload
