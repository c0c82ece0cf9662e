//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/layout"
	"github.com/kvhost/kvhost/plugins/layermajor"
)

func init() { layout.Export(layermajor.New) }

func main() {}
