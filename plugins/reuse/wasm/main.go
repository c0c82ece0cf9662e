//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/admit"
	"github.com/kvhost/kvhost/plugins/reuse"
)

func init() { admit.Export(reuse.New) }

func main() {}
