// Package benchpath stores and loads for kvhost bench as engines do: through a client's session with a host that runs in a
// process of its own, because CUDA does not let a process open the IPC handles of its own memory. The client is the Go one,
// in this process.
package benchpath

import (
	"context"
	"errors"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/transfer/pathbench"
)

// Config is a host and its clients.
type Config struct {
	Host *config.Config // of which the socket, the log and the roots are replaced
	Root config.Root    // the host's only one

	running map[string]*hostProcess // by its setting of store.compression
}

// Open connects a client. The first one's host serves the others with its setting of store.compression too, and ends with the
// last of them.
func (c *Config) Open(ctx context.Context, shared *pathbench.Shared) (_ pathbench.Path, err error) {
	h := c.running[shared.Compression]
	if h == nil || h.clients == 0 {
		cfg := c.Host.Clone()
		cfg.Store.Compression, cfg.Compressions, cfg.Roots = shared.Compression, nil, []config.Root{c.Root}
		if h, err = startHost(ctx, cfg); err != nil {
			return nil, err
		}
		if c.running == nil {
			c.running = map[string]*hostProcess{}
		}
		c.running[shared.Compression] = h
	}
	h.clients++
	session, err := newSession(ctx, h, shared)
	if err != nil {
		return nil, errors.Join(err, h.leave())
	}
	return session, nil
}
