// Package benchpath stores and loads for kvhost bench as engines do: through a client's session with a host that runs in a
// process of its own, because CUDA does not let a process open the IPC handles of its own memory. The client is the Go one,
// in this process, or the Python one, in a third.
package benchpath

import (
	"context"
	"errors"

	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/transfer/pathbench"
)

// Config is a host and a client of it.
type Config struct {
	Host   *config.Config // of which the socket, the log and the roots are replaced
	Root   config.Root    // the host's only one
	Python string         // the interpreter of the Python client; empty: the Go client
}

// Open starts the host and connects the client.
func Open(ctx context.Context, c Config, shared *pathbench.Shared) (path pathbench.Path, err error) {
	h, err := startHost(ctx, c.Host, c.Root)
	if err != nil {
		return nil, err
	}
	if c.Python != "" {
		path, err = newPythonPath(ctx, h, c.Python, shared)
	} else {
		path, err = newGoPath(ctx, h, shared)
	}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return path, nil
}
