package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/staging"
)

// Probe tests the machine for a configuration.
func Probe(ctx context.Context, c *config.Config) (*Facts, error) {
	return probe(ctx, c, system{"/"}, nil, nil)
}

// probe is Probe with the directory of the system's files and the names of the libraries given.
func probe(ctx context.Context, c *config.Config, s system, libcuda, libcufile []string) (*Facts, error) {
	f := &Facts{Machine: s.machine()}
	f.Driver.Kernel, f.Driver.Open, f.Driver.Params = s.driverModule()
	g := &gpus{facts: f}
	if f.Driver.Forbid = c.GDS.CUDA == config.CUDAOff; !f.Driver.Forbid {
		defer g.close()
		g.open(libcuda)
		g.ready(c.MayUseCuFile(), libcufile)
	}
	for _, r := range c.Roots {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		root := Root{Path: r.Path, Node: staging.NoNode, Direct: Unknown, NoReplace: Unknown}
		switch r.Kind() {
		case config.Directory:
			root = s.probeRoot(r.Path, g.ask())
		case config.Memory:
			root.Memory = true
		case config.Bucket:
			fsys, err := s3fs.Open(r.Bucket())
			if err != nil {
				return nil, err
			}
			root.Bucket = fsys.Try()
			_ = fsys.Close() // it has no lock
		}
		f.Roots = append(f.Roots, root)
	}
	return f, nil
}

// gpus are the GPUs while they are probed.
type gpus struct {
	facts *Facts
	used  []*gds.GPU
	files *gds.CuFile
	logs  string
}

func (g *gpus) open(libcuda []string) {
	driver, err := gds.Open(nil, libcuda...)
	if err != nil {
		g.facts.Driver.Failed = err.Error()
		if errors.Is(err, gds.ErrNoDriver) {
			g.facts.Driver.Failed = gds.ErrNoDriver.Error() // the name of the missing file is not useful here
		}
		return
	}
	g.facts.Driver.CUDA = driver.Version()
	devices, err := driver.Devices()
	if err != nil {
		g.facts.Driver.Failed = err.Error()
		return
	}
	for _, d := range devices {
		out := GPU{UUID: d.UUID.String(), Name: d.Name, PCI: d.PCI, Bytes: d.Memory, Node: staging.NoNode,
			Pinned: Unknown}
		if node, err := staging.SystemTopology().NodeOfPCI(d.PCI); err == nil {
			out.Node = node
		}
		if used, err := driver.OpenGPU(d.UUID, gds.Config{Threads: 1}); err != nil {
			out.Failed = err.Error()
		} else {
			g.used = append(g.used, used)
			out.Copies = used.Mode().String()
			out.Pinned = pins(used)
		}
		g.facts.GPUs = append(g.facts.GPUs, out)
	}
}

// ready opens cuFile if there is a GPU and the configuration permits it.
func (g *gpus) ready(allowed bool, libcufile []string) {
	if g.facts.CuFile.Forbid = !allowed; len(g.used) == 0 || !allowed {
		return
	}
	if err := g.openCuFile(libcufile); err != nil {
		g.files = nil
		g.facts.CuFile.Failed = err.Error()
	}
}

// pins tries to page-lock memory for a GPU.
func pins(gpu *gds.GPU) Answer {
	slots, err := staging.NewSlots(1, 1<<20)
	if err != nil {
		return Unknown
	}
	defer slots.Close()
	if slots.Register(gpu.Pinner()) != nil {
		return No
	}
	return Yes
}

// openCuFile loads cuFile and opens its driver. It redirects cuFile's log.
func (g *gpus) openCuFile(names []string) (err error) {
	if g.files, err = gds.LoadCuFile(names...); err != nil {
		return err
	}
	if g.logs, err = os.MkdirTemp("", "kvhost-check-"); err != nil {
		return err
	}
	_ = g.files.SetText(gds.LogDir, g.logs) // an older cuFile does not have the setting
	if g.facts.CuFile.Version, err = g.files.Version(); err != nil {
		return err
	}
	if err := g.used[0].Control(func(t *gds.Thread) error { return g.files.Open(t) }); err != nil {
		return err
	}
	p, err := g.files.Properties()
	if err != nil {
		return err
	}
	if p.NVFSMajor+p.NVFSMinor > 0 {
		g.facts.CuFile.NVFS = fmt.Sprintf("%d.%d", p.NVFSMajor, p.NVFSMinor)
	}
	g.facts.CuFile.Compat = p.AllowCompat
	return nil
}

// ask returns a function that registers a file with cuFile and returns "ok" or the error. It returns nil without cuFile.
func (g *gpus) ask() func(fd int) string {
	if g.files == nil {
		return nil
	}
	return func(fd int) string {
		err := g.used[0].Control(func(t *gds.Thread) error {
			h, err := g.files.Register(t, fd)
			if err == nil {
				g.files.Deregister(t, h)
			}
			return err
		})
		if err != nil {
			return err.Error()
		}
		return "ok"
	}
}

func (g *gpus) close() {
	var errs []error
	if g.files != nil {
		errs = append(errs, g.used[0].Control(func(t *gds.Thread) error { return g.files.Close(t) }))
	}
	for _, used := range g.used {
		errs = append(errs, used.Close())
	}
	if g.logs != "" {
		errs = append(errs, os.RemoveAll(g.logs))
	}
	if err := errors.Join(errs...); err != nil && g.facts.Driver.Failed == "" {
		g.facts.Driver.Failed = err.Error()
	}
}
