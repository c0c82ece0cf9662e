//go:build invariants

package budget

const invariants = true
