//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/place"
	"github.com/kvhost/kvhost/plugins/striped"
)

func init() { place.Export(striped.New) }

func main() {}
