//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/gdsf"
)

func init() { evict.Export(gdsf.New) }

func main() {}
