//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	"github.com/kvhost/kvhost/plugins/sieve"
)

func init() { evict.Export(sieve.New) }

func main() {}
