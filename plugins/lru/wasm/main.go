//go:build wasip1

package main

import (
	"github.com/kvhost/kvhost/abi/guest/export/evict"
	_ "github.com/kvhost/kvhost/abi/guest/export/state"
	"github.com/kvhost/kvhost/plugins/lru"
)

func init() { evict.Export(lru.New) }

func main() {}
