//go:build !invariants

package budget

const invariants = false
