//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/layout"
	"github.com/kvhost/kvhost/plugins/blockmajor"
)

func init() { layout.Export(blockmajor.New) }

func main() {}
