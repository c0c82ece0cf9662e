//go:build !wasip1

package abi

import "embed"

// Sources are those of this package and of the Go kit below it, so that a host can hand them out with the kits for other
// languages. Guests do without.
//
//go:embed *.go guest
var Sources embed.FS
