//go:build !race

package metamorphic

const defaultOps = 300
