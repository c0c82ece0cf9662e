//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/arc"
)

func init() { evict.Export(arc.New) }

func main() {}
