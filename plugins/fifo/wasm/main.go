//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/fifo"
)

func init() { evict.Export(fifo.New) }

func main() {}
