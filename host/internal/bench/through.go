package bench

import (
	"context"
	"errors"

	"github.com/kvhost/kvhost/host/internal/config"
)

// Through stores and loads as engines do: through a client's session with a host that runs in a process of its own, because
// CUDA does not let a process open the IPC handles of its own memory. The client is the Go one, in this process.
type Through struct {
	Host *config.Config // of which the socket, the log and the roots are replaced
	Root config.Root    // the host's only one

	running map[string]*hostProcess // by its setting of store.compression
}

// Open connects a client. The first one's host serves the others with its setting of store.compression too, and ends with the
// last of them.
func (t *Through) Open(ctx context.Context, shared *Shared) (_ Path, err error) {
	h := t.running[shared.Compression]
	if h == nil || h.clients == 0 {
		cfg := t.Host.Clone()
		cfg.Store.Compression, cfg.Compressions, cfg.Roots = shared.Compression, nil, []config.Root{t.Root}
		if h, err = startHost(ctx, cfg); err != nil {
			return nil, err
		}
		if t.running == nil {
			t.running = map[string]*hostProcess{}
		}
		t.running[shared.Compression] = h
	}
	h.clients++
	session, err := newSession(ctx, h, shared)
	if err != nil {
		return nil, errors.Join(err, h.leave())
	}
	return session, nil
}
