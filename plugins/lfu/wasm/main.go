//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/lfu"
)

func init() { evict.Export(lfu.New) }

func main() {}
