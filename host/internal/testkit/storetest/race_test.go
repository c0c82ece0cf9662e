//go:build race

package storetest

// defaultOps is fewer where everything takes longer.
const defaultOps = 100
