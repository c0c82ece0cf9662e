//go:build !wasip1

package abi

import "embed"

// Sources are the source files of this package and of the Go kit, which a host hands out with the kits for other
// languages. Guests do not embed them.
//
//go:embed *.go guest
var Sources embed.FS
