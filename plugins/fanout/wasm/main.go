//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/place"
	"github.com/kvhost/kvhost/plugins/fanout"
)

func init() { place.Export(fanout.New) }

func main() {}
