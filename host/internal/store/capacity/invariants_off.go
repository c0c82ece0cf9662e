//go:build !invariants

package capacity

const invariants = false
