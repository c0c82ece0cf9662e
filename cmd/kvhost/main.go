// Command kvhost runs a KV-cache offload host and the tools around it.
package main

import (
	"context"
	"os"

	"github.com/kvhost/kvhost/host/command"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(command.Main(context.Background(), version, os.Args[1:])) }
