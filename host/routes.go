package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging"
)

// probeTime bounds the trial of one GPU and root. Storage that needs longer for a few files is staged.
const probeTime = 20 * time.Second

// probeBytes is what the trial of a root may write. It is kept out of what the store may use, since a root is full when a
// host that has run before starts again. The files are temporaries of the store's own, which it removes when it opens the root
// after a host that was killed. Hosts of a shared root try it one after the other.
func probeBytes(r config.Root) int64 { return min(64<<20, r.Capacity/16) }

// wantsDirect says whether the direct route is to be tried for a root, if there is a GPU.
func (h *Host) wantsDirect(r config.Root) bool {
	return h.driver != nil && h.cfg.TriesDirect(r)
}

// fileSystem is what the store and the trials of routes work on. The handles that cuFile has are closed with the files that
// the store removes.
func (h *Host) fileSystem() staging.FS {
	fsys := staging.OS()
	if !h.cfg.Engine.DirectIO {
		fsys = staging.Buffered(fsys)
	}
	if h.driver == nil || !h.cfg.GDS.UseCuFile {
		return fsys
	}
	return staging.OnRemove(fsys, func(dev, ino uint64) {
		h.directMu.Lock()
		direct := h.direct
		h.directMu.Unlock()
		for _, d := range direct {
			d.Handles.Forget(dev, ino)
		}
	})
}

// openRoutes decides for each GPU and root how pieces move, and logs it in one line each. Nothing here keeps a host from
// starting: what does not work is staged.
func (h *Host) openRoutes(ctx context.Context) {
	if len(h.gpus) == 0 {
		return
	}
	direct, why := h.openDirect()
	chosen := map[*gds.DirectRoute]bool{}
	for i, s := range h.store.Stats().Roots {
		for _, g := range h.gpus {
			choice := transfer.RouteChoice{Why: "as configured"}
			switch d := direct[g]; {
			case !h.wantsDirect(h.cfg.Roots[i]):
			case d == nil:
				choice.Why = why.Error()
			default:
				choice = h.tryRoute(ctx, d, h.cfg.Roots[i], s.Path)
			}
			h.engine.SetRoute(g, s.Path, choice)
			route := "staged"
			if choice.Direct != nil {
				route, chosen[choice.Direct] = "direct", true
			}
			h.log.Info("how pieces move", "gpu", g.UUID.String(), "root", s.Path, "route", route, "why", choice.Why)
		}
	}
	for g, d := range direct {
		if chosen[d] {
			continue
		}
		if err := d.Trim(); err != nil { // what the trials took is the engine's to use
			h.log.Warn("device memory of the trials is not given back", "gpu", g.UUID.String(), "error", err)
		}
	}
}

func (h *Host) tryRoute(ctx context.Context, d *gds.DirectRoute, r config.Root, dir string) transfer.RouteChoice {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	if r.Shared {
		turn, err := h.turnToTry(ctx, dir)
		if err != nil {
			return transfer.RouteChoice{Why: err.Error()}
		}
		defer turn.Close()
	}
	choice := h.engine.Probe(ctx, transfer.ProbeRequest{
		Direct: d, FS: h.fs, Name: func() string { return h.store.ScratchName(dir, "trial") }, Bytes: probeBytes(r), Always: r.Route == config.RouteDirect,
	})
	choice.Shared = r.Shared
	return choice
}

// turnToTry waits until no other host of a shared root tries its routes there: the bytes that are kept free do for one.
func (h *Host) turnToTry(ctx context.Context, dir string) (io.Closer, error) {
	for {
		turn, err := h.fs.Lock(filepath.Join(dir, pieceformat.MetaDir, "trial.lock"))
		if !errors.Is(err, staging.ErrLocked) {
			return turn, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("another host is trying the root: %w", ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// openDirect loads cuFile, once and only if some root wants it, and gives each GPU a direct route. why says what is missing
// where a GPU has none.
func (h *Host) openDirect() (routes map[*gds.GPU]*gds.DirectRoute, why error) {
	routes = map[*gds.GPU]*gds.DirectRoute{}
	wanted := false
	for _, r := range h.cfg.Roots {
		wanted = wanted || h.wantsDirect(r)
	}
	if !wanted {
		return routes, nil
	}
	c, err := h.openCuFile()
	if err != nil {
		return routes, err
	}
	for _, g := range h.gpus {
		d, err := gds.NewDirectRoute(g, c, gds.DirectConfig{
			BufferBytes: int64(h.cfg.GDS.BufferMiB) << 20, Handles: h.cfg.GDS.HandleCache, Limit: h.cfg.Store.IOTimeout,
		})
		if err != nil {
			why = errors.Join(why, err)
			continue
		}
		routes[g] = d
		h.directMu.Lock()
		h.direct = append(h.direct, d)
		h.directMu.Unlock()
	}
	return routes, why
}

func (h *Host) openCuFile() (*gds.CuFile, error) {
	c, err := gds.LoadCuFile()
	if err != nil {
		return nil, err
	}
	dir := h.cfg.GDS.LogDir
	if dir == "" {
		dir = filepath.Dir(h.cfg.Socket)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	if err := c.Configure(dir); err != nil {
		h.log.Warn("cuFile keeps its own configuration", "error", err)
	}
	if lost := h.gpus[0].DoFile(func(t *gds.Thread) { err = c.Open(t) }); lost != nil || err != nil {
		return nil, fmt.Errorf("cuFile's driver does not open: %w", errors.Join(lost, err))
	}
	h.cufile = c
	if err := c.StartStats(); err != nil {
		h.log.Info("cuFile keeps no statistics, so that its route is not known", "error", err)
	}
	return c, nil
}

// closeDirect gives up what cuFile holds, before the GPUs are closed.
func (h *Host) closeDirect() error {
	var errs []error
	for _, d := range h.direct {
		errs = append(errs, h.unlessHung(d.Close()))
	}
	stuck := 0
	for _, g := range h.gpus {
		stuck += g.Hung()
	}
	if h.cufile != nil && h.gpus[0].Err() == nil && stuck == 0 {
		var err error
		errs = append(errs, h.gpus[0].DoFile(func(t *gds.Thread) { err = h.cufile.Close(t) }), err)
	}
	return errors.Join(errs...)
}
