//go:build race

package metamorphic

// defaultOps is fewer where everything takes longer.
const defaultOps = 150
