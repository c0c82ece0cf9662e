//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/twoq"
)

func init() { evict.Export(twoq.New) }

func main() {}
