//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/clock"
)

func init() { evict.Export(clock.New) }

func main() {}
