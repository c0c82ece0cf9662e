//go:build race

package metamorphic_test

// defaultOps is fewer where everything takes longer.
const defaultOps = 150
