package doctor

import (
	"cmp"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/staging"
)

// contextBytes is the approximate GPU memory of a context with the kernels.
const contextBytes = 600 << 20

// Judge returns the report for facts. deviceBytes is the memory that a host allocates on each GPU in addition to the context.
func Judge(version string, c *config.Config, deviceBytes int64, f *Facts) *Report {
	r := &Report{Version: version, config: c, Facts: *f, Verdicts: []Verdict{}, Findings: []Finding{}, Memory: []VRAM{}}
	for i := range f.Roots {
		root := &f.Roots[i]
		r.Verdicts = append(r.Verdicts, hostVerdict(c, root))
		for k := range f.GPUs {
			v := gpuVerdict(f, &f.GPUs[k], root)
			switch asked := c.Roots[i].Route; {
			case asked == RouteStaged && v.Route == RouteDirect:
				v.Route, v.Why = RouteStaged, "as configured; the direct route would work: "+v.Why
			case asked == RouteDirect && v.Route == RouteStaged && root.CuFile == "ok":
				v.Route, v.Why = RouteDirect, "as configured, though "+v.Why
			case asked == RouteDirect && v.Route == RouteStaged:
				r.find(Problem, "root "+root.Path, v.Fix,
					"the direct route is configured, but does not work from %s: %s", v.GPU, v.Why)
			}
			r.Verdicts = append(r.Verdicts, v)
		}
	}
	r.judgeRoots(c, f)
	r.judgeLevels(c.Roots)
	r.judgeMachine(c, f)
	r.judgeGPUs(c, deviceBytes, f)
	return r
}

func (r *Report) find(level Level, about, fix, says string, args ...any) {
	r.Findings = append(r.Findings, Finding{level, about, fmt.Sprintf(says, args...), fix})
}

// unusable returns the reason why a root cannot hold files. It is empty if the root can.
func (root *Root) unusable() string {
	switch {
	case root.Memory:
		return ""
	case root.Bucket != nil:
		return strings.Join(root.Bucket.Failed, "; ")
	case root.Parent != "":
		return root.Parent + " does not exist"
	case root.Failed != "":
		return root.Failed
	case !root.Writable:
		return "cannot create a file in " + root.Tried
	}
	return ""
}

// fileAccess describes how the root's files are read and written.
func fileAccess(c *config.Config, root *Root) string {
	switch {
	case root.Bucket != nil:
		return "by requests"
	case !c.Engine.DirectIO:
		return "through the page cache, as configured"
	case root.Direct == Yes:
		return "with direct I/O"
	}
	return "through the page cache: " + root.FS + " does not support direct I/O"
}

func hostVerdict(c *config.Config, root *Root) Verdict {
	v := Verdict{Root: root.Path, Route: RouteStaged, Why: "the CPU copies shared memory, files " + fileAccess(c, root)}
	if root.Memory {
		v.Route, v.Why = RouteMemory, "the CPU copies between shared memory and the root's memory"
	}
	if why := root.unusable(); why != "" {
		v.Route, v.Why = RouteNone, why
	}
	return v
}

func gpuVerdict(f *Facts, g *GPU, root *Root) Verdict {
	v := Verdict{GPU: g.UUID, Root: root.Path, Route: RouteNone}
	switch why := root.unusable(); {
	case why != "":
		v.Why = why
		return v
	case g.Failed != "":
		v.Why = g.Failed
		return v
	}
	v.Route = RouteStaged
	switch {
	case root.Memory:
		v.Route, v.Why = RouteMemory, "the GPU copies between its pages and the root's page-locked memory"
	case root.Bucket != nil:
		v.Why = "objects are sent and received from memory of the host"
	case f.CuFile.Forbid:
		v.Why = "as configured: gds.max_device_memory = 0 forbids the direct route"
	case f.CuFile.Version == 0:
		v.Why, v.Fix = "cuFile is not installed", "install libcufile (CUDA toolkit, gds-tools) for peer-to-peer DMA"
	case f.CuFile.Failed != "":
		v.Why, v.Fix = "cuFile does not start: "+f.CuFile.Failed, "run nvidia-smi and gdscheck -p for details"
	case root.Direct != Yes:
		v.Why, v.Fix = root.FS+" does not support direct I/O, which DMA needs", "use ext4 or xfs on NVMe"
	case root.CuFile != "ok":
		v.Why = "cuFile does not accept its files: " + cmp.Or(root.CuFile, "not tried")
		v.Fix = "use ext4 or xfs on NVMe, or a file system that its vendor supports with cuFile"
		if !f.Machine.Udev {
			v.Fix = "there is no udev database: in a container mount /run/udev (-v /run/udev:/run/udev:ro)"
		}
	case f.CuFile.NVFS != "":
		v.Route, v.Why = RouteDirect, "nvidia-fs "+f.CuFile.NVFS+" is loaded, and cuFile accepts its files"
	default:
		if missing, fix := noPeer(f, root); missing != "" {
			v.Why = "cuFile would run in compatibility mode, which also stages: no nvidia-fs, no peer-to-peer DMA: " + missing
			v.Fix = fix
		} else {
			v.Route, v.Why = RouteDirect, "the kernel, the driver and the disk support peer-to-peer DMA"
		}
	}
	return v
}

// noPeer returns the first unmet condition of peer-to-peer DMA without nvidia-fs, and its remedy.
func noPeer(f *Facts, root *Root) (missing, fix string) {
	switch {
	case f.Machine.P2PDMA == No:
		return "the kernel has no CONFIG_PCI_P2PDMA", "run a kernel with CONFIG_PCI_P2PDMA=y, 6.2 or later"
	case f.Machine.P2PDMA == Unknown:
		return "the kernel does not publish its configuration, so CONFIG_PCI_P2PDMA is unknown",
			"install /boot/config-" + f.Machine.Kernel
	case f.Driver.Open != Yes:
		return "the NVIDIA kernel modules are not the open ones", "install the open kernel modules, 565 or later"
	case root.FS != "ext4" && root.FS != "xfs":
		return root.FS + " is neither ext4 nor xfs", "use ext4 or xfs on NVMe"
	case !strings.HasPrefix(root.Device, "nvme"):
		return cmp.Or(root.Device, "its device") + " is not an NVMe disk", "put the root on a local NVMe disk"
	case f.Machine.Arch == "amd64" && !strings.Contains(f.Driver.Params, "RMForceStaticBar1=1"):
		return "the driver has no static BAR1",
			`load the module with NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;" and set use_pci_p2pdma in cufile.json`
	}
	return "", ""
}

func (r *Report) judgeRoots(c *config.Config, f *Facts) {
	type disk struct {
		wanted, total int64
		roots         []string
	}
	disks, order := map[string]*disk{}, []string{}
	for i := range f.Roots {
		root, want := &f.Roots[i], c.Roots[i]
		if root.Memory {
			continue
		}
		about := "root " + root.Path
		if root.Bucket != nil {
			r.judgeBucket(about, root.Bucket, want.Shared)
			continue
		}
		if root.unusable() != "" {
			if root.Failed != "" && root.Writable { // otherwise a start refuses the root
				r.find(Problem, about, "look after the device or the mount", "%s", root.Failed)
			}
			continue
		}
		if root.Total == 0 {
			if want.MinFree != (config.Amount{}) {
				r.find(Warning, about, "remove min_free", "min_free has no effect, as its %s states no size: the capacity alone bounds the root", root.FS)
			}
		} else if want.Capacity > root.Total {
			r.find(Problem, about, "set a capacity below the file system's size",
				"capacity %s, but the file system has only %s", config.SizeText(want.Capacity), config.SizeText(root.Total))
		} else if left := root.Available - max(want.MinFree.Bytes, int64(want.MinFree.Part*float64(root.Total))); want.Capacity > left {
			r.find(Warning, about, "free space, or set a lower capacity or min_free",
				"capacity %s, but only %s available, of which min_free leaves %s, unless this root's own pieces hold the rest",
				config.SizeText(want.Capacity), config.SizeText(root.Available), config.SizeText(max(0, left)))
		}
		if c.Engine.DirectIO && root.Direct == No {
			r.find(Note, about, "", "%s does not support direct I/O: files go through the page cache", root.FS)
		}
		if root.FS == "tmpfs" || root.FS == "ramfs" {
			r.find(Note, about, "", "its %s is memory of the machine: the root's chunks are gone after a boot", root.FS)
		}
		if root.HugePages == No {
			r.find(Warning, about, "mount -o remount,huge=always "+root.Mount,
				"its tmpfs has small pages: the first load of a file and stores take half as long again as with huge ones")
		}
		if root.NoReplace == No {
			r.find(Note, about, "", "%s cannot rename without replacing: pieces are published with link and unlink",
				root.FS)
		}
		for _, m := range root.Shared {
			r.find(Note, about, "", "engines with TP %s share chunks of %s, which have %d files instead of one for each rank", m.sizes(), m.Model, m.Units)
		}
		if root.Device == "" {
			continue
		}
		d := disks[root.Device]
		if d == nil {
			d = &disk{total: root.Total}
			disks[root.Device], order = d, append(order, root.Device)
		}
		d.wanted, d.roots = d.wanted+want.Capacity, append(d.roots, root.Path)
	}
	for _, name := range order {
		if d := disks[name]; len(d.roots) > 1 && d.wanted > d.total {
			r.find(Problem, "roots "+strings.Join(d.roots, ", "), "lower their capacities",
				"capacities of %s together, but they share %s of %s", config.SizeText(d.wanted), name, config.SizeText(d.total))
		}
	}
}

// mostSkew is the tolerated difference between clocks. Requests are signed with the time, and servers refuse a request that is
// 15 minutes off.
const mostSkew = 5 * time.Minute

func (r *Report) judgeBucket(about string, t *s3fs.Trial, shared bool) {
	for _, failed := range t.Failed {
		r.find(Problem, about, "see host/docs/s3.md for the rights that are needed", "cannot %s", failed)
	}
	switch {
	case t.Conditional || len(t.Failed) > 0:
	case shared:
		r.find(Problem, about, "give the root one host, without shared", "%v", s3fs.ErrConditions)
	default:
		r.find(Warning, about, "start no second host with this root",
			"the server has no conditional writes: of two hosts that start at the same time both may take the root")
	}
	if t.Clock.Abs() > mostSkew {
		r.find(Warning, about, "set this machine's clock", "the server's clock is %s ahead", t.Clock)
	}
}

// rootMemory returns the bytes of all roots in memory.
func rootMemory(c *config.Config) (bytes int64) {
	for _, r := range c.Roots {
		if r.Kind().TakesMemory() {
			bytes += r.Capacity
		}
	}
	return bytes
}

// pages returns the kind of pages for the given bytes of staging memory or of roots in memory.
func (m *Machine) pages(bytes int64) staging.Pages {
	switch {
	case m.HugePages > 0 && bytes <= m.HugePages*m.HugePage:
		return staging.HugePages
	case m.Transparent:
		return staging.TransparentPages
	}
	return staging.SmallPages
}

// manyFiles is the maximum number of open files of a host with default settings. A layer-wise load keeps one open for
// each chunk.
const manyFiles = 1 << 14

func (r *Report) judgeMachine(c *config.Config, f *Facts) {
	m := &f.Machine
	roots := rootMemory(c)
	wanted, what, fix := c.Engine.MaxStagingMemory, "of staging memory", "lower engine.max_staging_memory"
	if roots > 0 {
		wanted += roots
		what, fix = "of staging memory and roots in memory", "lower the capacities of the roots in memory"
	}
	switch {
	case wanted > m.MemoryBytes && m.MemoryBytes > 0:
		r.find(Problem, "memory", fix, "%s %s, but the machine has only %s", config.SizeText(wanted), what, config.SizeText(m.MemoryBytes))
	case wanted > m.FreeBytes && m.FreeBytes > 0 && m.pages(wanted) != staging.HugePages:
		r.find(Warning, "memory", fix, "%s %s, but only %s available", config.SizeText(wanted), what, config.SizeText(m.FreeBytes))
	}
	if roots > 0 && len(f.GPUs) > 0 && m.Memlock >= 0 && m.Memlock < wanted {
		r.find(Warning, "locked memory", "LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 for containers",
			"the limit is %s, less than the %s %s", config.SizeText(m.Memlock), config.SizeText(wanted), what)
	}
	if roots > 0 && m.pages(wanted) == staging.SmallPages {
		r.find(Note, "huge pages", "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled, or reserve vm.nr_hugepages",
			"none for roots in memory: page-locking them takes longer")
	}
	if m.OpenFiles > 0 && m.OpenFiles < manyFiles {
		r.find(Warning, "open files", "LimitNOFILE=524288 in systemd, ulimit -Hn elsewhere",
			"the limit is %d; layer-wise loads keep a file open for each chunk", m.OpenFiles)
	}
}

func (r *Report) judgeGPUs(c *config.Config, deviceBytes int64, f *Facts) {
	switch {
	case c.GDS.CUDA == config.CUDAOff:
		r.find(Note, "GPU", "", "off, as configured: clients register host memory")
	case f.Driver.Failed != "":
		r.find(Note, "GPU", "install the NVIDIA driver, or give the container the GPU (--gpus)", "none: %s",
			f.Driver.Failed)
	case len(f.GPUs) == 0:
		r.find(Note, "GPU", "", "the driver shows none")
	}
	for i := range f.GPUs {
		g := &f.GPUs[i]
		about := "GPU " + g.UUID
		if g.Failed != "" {
			r.find(Warning, about, "nvidia-smi -q -i "+g.UUID, "unusable: %s", g.Failed)
			continue
		}
		if g.Pinned == No {
			fix := "give the machine more memory, or lower engine.max_staging_memory"
			if f.Machine.Memlock >= 0 && f.Machine.Memlock < c.Engine.MaxStagingMemory+rootMemory(c) {
				fix = "LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 for containers"
			}
			r.find(Warning, about, fix, "memory cannot be page-locked: copies will be slow")
		}
		for k := range f.Roots {
			if root := &f.Roots[k]; root.Node >= 0 && g.Node >= 0 && root.Node != g.Node {
				r.find(Note, about, "put the root on a disk of the GPU's node",
					"on NUMA node %d, but root %s is on node %d", g.Node, root.Path, root.Node)
			}
		}
		takes := contextBytes + deviceBytes
		r.Memory = append(r.Memory, VRAM{
			GPU: g.UUID, Bytes: g.Bytes, Takes: takes,
			Utilization: math.Floor(100*(1-float64(takes)/float64(max(g.Bytes, 1)))) / 100,
		})
	}
}
