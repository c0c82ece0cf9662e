//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/s3fifo"
)

func init() { evict.Export(s3fifo.New) }

func main() {}
