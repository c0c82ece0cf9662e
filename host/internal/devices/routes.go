package devices

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/staging"
)

// probeTimeout limits the probe of one GPU and root. A storage that needs longer for a few files is staged.
const probeTimeout = 20 * time.Second

// probeBytes returns the bytes that the probe of a root's direct route may write. It is 0 for a root that is not
// probed. The store must not use these bytes, because a root of a host that has run before is full at the start. The
// files are temporaries of the store: if a host is killed, the store removes them when it opens the root. Hosts of a
// shared root probe one at a time.
func (d *Devices) probeBytes(r config.Root) int64 {
	if !d.triesDirect(r) {
		return 0
	}
	return min(64<<20, r.Capacity/16)
}

// triesDirect reports whether the direct route is tried for a root, if there is a GPU.
func (d *Devices) triesDirect(r config.Root) bool { return d.driver != nil && d.cfg.TriesDirect(r) }

// FileSystem returns the file system of the roots, for the store and the probes. When the store removes a file, cuFile's handle of it is
// closed.
func (d *Devices) FileSystem() staging.FS {
	var dirs []string
	for _, r := range d.cfg.Roots {
		if r.Kind().HasDirectory() {
			dirs = append(dirs, r.Path)
		}
	}
	fsys := staging.Below(dirs...)
	if !d.cfg.Engine.DirectIO {
		fsys = staging.Buffered(fsys)
	}
	if d.driver == nil || !d.cfg.MayUseCuFile() {
		return fsys
	}
	return staging.OnRemove(fsys, func(dev, ino uint64) {
		d.mu.Lock()
		direct := d.direct
		d.mu.Unlock()
		for _, route := range direct {
			route.Handles.Forget(dev, ino)
		}
	})
}

// OpenRoutes decides for each GPU and root how pieces move, and logs each decision in one line. Probing takes seconds, so it
// runs in the background until EndRoutes, and pieces are staged in the meantime.
func (d *Devices) OpenRoutes(engine *transfer.Engine, st *store.Store, fsys staging.FS) {
	ctx, cancel := context.WithCancel(context.Background())
	d.endProbes = cancel
	go func() {
		defer close(d.routed)
		if len(d.gpus) > 0 {
			d.openRoutes(ctx, engine, st, fsys)
			d.log.Info("all routes are chosen")
		}
	}()
}

// Routed returns a channel that is closed when all routes are chosen.
func (d *Devices) Routed() <-chan struct{} { return d.routed }

// EndRoutes ends the choice of routes, which uses the engine.
func (d *Devices) EndRoutes() {
	if d.endProbes != nil {
		d.endProbes()
		<-d.routed
	}
}

func (d *Devices) openRoutes(ctx context.Context, engine *transfer.Engine, st *store.Store, fsys staging.FS) {
	direct, why := d.openDirect()
	chosen := map[*gds.DirectRoute]bool{}
	p := prober{engine: engine, store: st, fs: fsys}
	roots := st.Stats().Roots
	for i, r := range d.cfg.Roots { // without roots that the host adds by itself: entries that peers lend are staged
		path := roots[i].Path
		if r.Kind().TakesMemory() {
			d.log.Info("route chosen", "root", path, "route", "memory", "why", "its pieces are page-locked memory")
			continue
		}
		for _, g := range d.gpus {
			if ctx.Err() != nil {
				return // nothing is decided
			}
			choice := transfer.RouteChoice{Why: "as configured"}
			switch route := direct[g]; {
			case !d.triesDirect(r):
			case route == nil:
				choice.Why = why.Error()
			default:
				choice = p.probe(ctx, route, r, path, d.probeBytes(r))
			}
			engine.SetRoute(g, path, choice)
			route := "staged"
			if choice.Direct != nil {
				route, chosen[choice.Direct] = "direct", true
			}
			d.log.Info("route chosen", "gpu", g.UUID.String(), "root", path, "route", route, "why", choice.Why)
		}
	}
	for g, route := range direct {
		if chosen[route] {
			continue
		}
		if err := route.Trim(); err != nil { // the engine can use the memory of the probes
			d.log.Warn("device memory of the route probes not released", "gpu", g.UUID.String(), "error", err)
		}
	}
}

type prober struct {
	engine *transfer.Engine
	store  *store.Store
	fs     staging.FS
}

func (p *prober) probe(ctx context.Context, route *gds.DirectRoute, r config.Root, dir string,
	bytes int64) transfer.RouteChoice {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if r.Shared {
		lock, err := p.lock(ctx, dir)
		if err != nil {
			return transfer.RouteChoice{Why: err.Error()}
		}
		defer lock.Close()
	}
	choice := p.engine.Probe(ctx, transfer.ProbeRequest{
		Direct: route, FS: p.fs, Name: func() string { return p.store.ScratchName(dir, "probe") }, Bytes: bytes,
		Always: r.Route == config.RouteDirect,
	})
	choice.Shared = r.Shared
	return choice
}

// lock waits until no other host of a shared root probes its routes there. The reserved bytes are enough for one host.
func (p *prober) lock(ctx context.Context, dir string) (io.Closer, error) {
	for {
		lock, err := p.fs.Lock(filepath.Join(dir, pieceformat.MetaDir, "probe.lock"))
		if !errors.Is(err, staging.ErrLocked) {
			return lock, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("another host probes its routes on the root: %w", ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// openDirect loads cuFile if a root wants it, and gives each GPU a direct route. why is the reason if a GPU has none.
func (d *Devices) openDirect() (routes map[*gds.GPU]*gds.DirectRoute, why error) {
	routes = map[*gds.GPU]*gds.DirectRoute{}
	wanted := false
	for _, r := range d.cfg.Roots {
		wanted = wanted || d.triesDirect(r)
	}
	if !wanted {
		return routes, nil
	}
	c, err := d.openCuFile()
	if err != nil {
		return routes, err
	}
	for _, g := range d.gpus {
		route, err := gds.NewDirectRoute(g, c, gds.DirectConfig{
			BufferBytes: d.cfg.GDS.MaxDeviceMemory, Handles: idleHandles, Limit: d.cfg.Store.IOTimeout,
		})
		if err != nil {
			why = errors.Join(why, err)
			continue
		}
		routes[g] = route
		d.mu.Lock()
		d.direct = append(d.direct, route)
		d.mu.Unlock()
	}
	return routes, why
}

func (d *Devices) openCuFile() (*gds.CuFile, error) {
	c, err := gds.LoadCuFile()
	if err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(filepath.Dir(d.cfg.Socket)) // directory for cuFile's log
	if err != nil {
		return nil, err
	}
	if err := c.Configure(dir); err != nil {
		d.log.Warn("cuFile not configured; it uses its own configuration", "error", err)
	}
	if lost := d.gpus[0].DoFile(func(t *gds.Thread) { err = c.Open(t) }); lost != nil || err != nil {
		return nil, fmt.Errorf("cuFile's driver does not open: %w", errors.Join(lost, err))
	}
	d.cufile = c
	if err := c.StartStats(); err != nil {
		d.log.Info("cuFile has no statistics; its route is unknown", "error", err)
	}
	return c, nil
}

// closeDirect releases cuFile's resources before the GPUs are closed.
func (d *Devices) closeDirect() error {
	var errs []error
	for _, route := range d.direct {
		errs = append(errs, d.unlessHung(route.Close()))
	}
	stuck := 0
	for _, g := range d.gpus {
		stuck += g.Hung()
	}
	if d.cufile != nil && d.gpus[0].Err() == nil && stuck == 0 {
		var err error
		errs = append(errs, d.gpus[0].DoFile(func(t *gds.Thread) { err = d.cufile.Close(t) }), err)
	}
	return errors.Join(errs...)
}
