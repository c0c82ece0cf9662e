//go:build !race

package storetest

const defaultOps = 300
