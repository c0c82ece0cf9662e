package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/config"
)

var update = flag.Bool("update", false, "write the golden files anew")

// machines are possible facts. Each is judged and printed as in its golden file.
func machines() map[string]struct {
	wanted *config.Config
	facts  Facts
} {
	wanted := config.Default()
	wanted.Roots = []config.Root{{Path: "/mnt/kv", Capacity: 1 << 40}}
	wanted.Socket, wanted.Engine.MaxStagingMemory = "/run/kvhost/kvhost.sock", 4<<30
	machine := Machine{
		Kernel: "6.8.0", Arch: "amd64", CPUs: 64, MemoryBytes: 512 << 30, FreeBytes: 300 << 30, Nodes: 2, Memlock: -1,
		OpenFiles: 1 << 20,
		HugePage:  2 << 20, Transparent: true, P2PDMA: Yes, Udev: true,
	}
	gpu := GPU{UUID: "GPU-1", Name: "NVIDIA H200", PCI: "0000:41:00.0", Node: 0, Bytes: 140 << 30, Copies: "kernel",
		Pinned: Yes}
	root := Root{
		Path: "/mnt/kv", Tried: "/mnt/kv", FS: "ext4", Device: "nvme0n1p1", Node: 0, Total: 3 << 40,
		Available: 2 << 40, Writable: true,
		Direct: Yes, MemAlign: 4, OffAlign: 512, NoReplace: Yes, CuFile: "ok",
	}
	driver := Driver{CUDA: 13000, Kernel: "580.95.05", Open: Yes,
		Params: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"}
	type seen = struct {
		wanted *config.Config
		facts  Facts
	}
	out := map[string]seen{}
	add := func(name string, change func(*config.Config, *Facts)) {
		w := wanted.Clone()
		f := Facts{
			Machine: machine, Driver: driver, CuFile: CuFile{Version: 1150, Compat: true}, GPUs: []GPU{gpu},
			Roots: []Root{root},
		}
		change(w, &f)
		out[name] = seen{w, f}
	}
	add("levels", func(w *config.Config, f *Facts) {
		w.Roots = append(w.Roots, config.Root{Path: "memory:", Capacity: 64 << 30, Level: 2})
		f.Roots = append(f.Roots, Root{Path: "memory:", Memory: true})
	})
	add("peer", func(*config.Config, *Facts) {})
	add("nvfs", func(_ *config.Config, f *Facts) {
		f.CuFile.NVFS, f.Machine.NVFS, f.Machine.HugePages = "2.26", true, 4096
	})
	add("vm", func(_ *config.Config, f *Facts) {
		f.Machine.P2PDMA, f.Machine.Nodes, f.Roots[0].Device, f.Roots[0].Node, f.GPUs[0].Node = No, 1, "vda", -1, -1
	})
	add("staged", func(w *config.Config, _ *Facts) { w.Roots[0].Route = RouteStaged })
	add("forbidden", func(w *config.Config, f *Facts) {
		w.GDS.MaxDeviceMemory, f.CuFile, f.Roots[0].CuFile = 0, CuFile{Forbid: true},
			""
	})
	add("forced", func(w *config.Config, f *Facts) { w.Roots[0].Route, f.Machine.P2PDMA = RouteDirect, No })
	add("impossible", func(w *config.Config, f *Facts) {
		w.Roots[0].Route, f.Roots[0].CuFile = RouteDirect, "gds: cuFileHandleRegister: handle not registered (5027)"
	})
	add("container", func(_ *config.Config, f *Facts) {
		f.Machine.Udev, f.Machine.P2PDMA, f.Machine.OpenFiles = false, Unknown, 1024
		f.Roots[0].CuFile = "gds: cuFileHandleRegister: handle not registered (5027)"
	})
	add("laptop", func(w *config.Config, f *Facts) {
		f.Driver, f.CuFile,
			f.GPUs = Driver{Open: Unknown,
			Failed: "gds: no CUDA driver: libcuda.so.1: cannot open shared object file"}, CuFile{}, nil
		f.Roots[0] = Root{
			Path: "/home/u/kvhost-data", Tried: "/home/u", Missing: true, FS: "btrfs", Node: -1, Total: 500 << 30,
			Available: 100 << 30, Writable: true, Direct: No, NoReplace: Yes,
		}
		w.Roots[0] = config.Root{Path: "/home/u/kvhost-data", Capacity: 10 << 30, MinFree: config.Amount{Part: 0.19}}
		f.Machine.Nodes, f.Machine.Transparent = 1, false
	})
	add("tmpfs", func(w *config.Config, f *Facts) {
		w.Roots = []config.Root{{Path: "/dev/shm/kv", Capacity: 1 << 30}, {Path: "/mnt/huge", Capacity: 1 << 30}}
		small := Root{Path: "/dev/shm/kv", Tried: "/dev/shm", Missing: true, FS: "tmpfs", Mount: "/dev/shm", HugePages: No, Node: -1,
			Total: 200 << 30, Available: 200 << 30, Writable: true, Direct: Yes, NoReplace: Yes}
		huge := small
		huge.Path, huge.Tried, huge.Mount, huge.Missing, huge.HugePages = "/mnt/huge", "/mnt/huge", "/mnt/huge", false, Yes
		f.Roots = []Root{small, huge}
	})
	add("ramfs", func(w *config.Config, f *Facts) {
		w.Roots[0].MinFree = config.Amount{Part: 0.05}
		f.Roots[0].FS, f.Roots[0].Device, f.Roots[0].Total, f.Roots[0].Available = "ramfs", "", 0, 0
	})
	add("no-parent", func(w *config.Config, f *Facts) {
		f.Roots[0].Path, f.Roots[0].Tried, f.Roots[0].Parent, f.Roots[0].Missing = "/mnt/nvme0/kv", "/mnt", "/mnt/nvme0", true
	})
	add("broken", func(w *config.Config, f *Facts) {
		f.GPUs[0].Pinned = No
		f.GPUs = append(f.GPUs, GPU{UUID: "GPU-2", Name: "NVIDIA H200", PCI: "0000:42:00.0", Node: 1,
			Failed: "gds: cuDevicePrimaryCtxRetain: out of memory (2)"})
		f.Machine.Memlock, f.Machine.FreeBytes = 8<<20, 1<<30
		f.Roots[0].Total, f.Roots[0].NoReplace = 500<<30, No
		f.Roots = append(f.Roots,
			Root{Path: "/root/kv", Tried: "/root", Missing: true, Node: -1, FS: "xfs", Device: "nvme1n1", Total: 1 << 40, Available: 1 << 39,
				Failed: "open /root/.kvhost-check-1: permission denied"},
			Root{Path: "/dev/shm/kv", Tried: "/dev/shm", Missing: true, Node: -1, FS: "tmpfs", Total: 200 << 30,
				Available: 10 << 30, Writable: true, Direct: No, NoReplace: Yes})
		w.Roots = append(w.Roots, config.Root{Path: "/root/kv", Capacity: 1 << 30},
			config.Root{Path: "/dev/shm/kv", Capacity: 100 << 30})
	})
	inMemory := func(capacity int64) func(*config.Config, *Facts) {
		return func(w *config.Config, f *Facts) {
			w.Roots = append(w.Roots, config.Root{Path: "memory:", Capacity: capacity})
			f.Roots = append(f.Roots, Root{Path: "memory:", Memory: true, Node: -1, Direct: Unknown, NoReplace: Unknown})
		}
	}
	add("memory", inMemory(200<<30))
	add("memory-limits", func(w *config.Config, f *Facts) {
		inMemory(400<<30)(w, f)
		f.Machine.Memlock, f.Machine.Transparent = 8<<20, false
	})
	add("memory-too-large", inMemory(600<<30))
	return out
}

func TestReportsAreGolden(t *testing.T) {
	for name, m := range machines() {
		t.Run(name, func(t *testing.T) {
			r := Judge("test", m.wanted, 0, &m.facts)
			var got bytes.Buffer
			testenv.OK(t, r.Write(&got))
			path := filepath.Join("testdata", name+".txt")
			if *update {
				testenv.OK(t, os.WriteFile(path, got.Bytes(), 0o644))
			}
			want, err := os.ReadFile(path)
			testenv.OK(t, err)
			if !bytes.Equal(got.Bytes(), want) {
				t.Errorf("go test ./host/internal/doctor -update\n%s", got.String())
			}
			if problems := errors.Is(r.Problems(), ErrProblems); problems != (name == "broken" ||
				name == "impossible" || name == "nobody" || name == "read-only" || name == "memory-too-large") {
				t.Errorf("problems: %v", problems)
			}
			text, err := json.Marshal(r)
			testenv.OK(t, err)
			var back Report
			if err := json.Unmarshal(text, &back); err != nil || len(back.Verdicts) != len(r.Verdicts) {
				t.Errorf("as JSON: %v", err)
			}
		})
	}
}

// Two roots on one disk are judged together.
func TestRootsThatShareADisk(t *testing.T) {
	m := machines()["peer"]
	m.facts.Roots = append(m.facts.Roots, m.facts.Roots[0])
	m.facts.Roots[1].Path = "/mnt/kv2"
	m.wanted.Roots[0].Capacity = 2 << 40
	m.wanted.Roots = append(m.wanted.Roots, config.Root{Path: "/mnt/kv2", Capacity: 2 << 40})
	r := Judge("test", m.wanted, 0, &m.facts)
	if len(r.Findings) != 1 || r.Findings[0].Level != Problem {
		t.Fatalf("findings: got %+v, want one problem", r.Findings)
	}
}
