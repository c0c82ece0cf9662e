//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/wtinylfu"
)

func init() { evict.Export(wtinylfu.New) }

func main() {}
