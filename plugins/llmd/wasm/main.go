//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/place"
	"github.com/kvhost/kvhost/plugins/llmd"
)

func init() { place.Export(llmd.New) }

func main() {}
