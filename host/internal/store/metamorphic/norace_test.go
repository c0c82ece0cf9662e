//go:build !race

package metamorphic_test

const defaultOps = 300
