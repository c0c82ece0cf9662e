//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/lirs"
)

func init() { evict.Export(lirs.New) }

func main() {}
