//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/prefix"
)

func init() { evict.Export(prefix.New) }

func main() {}
