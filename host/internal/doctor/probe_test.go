package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

// Real directories are tested, the test's files are removed, and a missing root is not created.
func TestRootsAreTried(t *testing.T) {
	disk := t.TempDir()
	missing := filepath.Join(disk, "a")
	file := filepath.Join(disk, "file")
	testenv.OK(t, os.WriteFile(file, nil, 0o600))
	s := system{"/"}
	asked := 0
	for _, path := range []string{disk, missing} {
		r := s.probeRoot(path, func(fd int) string { asked++; return "ok" })
		if r.Failed != "" || !r.Writable || r.Tried != disk || r.Missing != (path == missing) || r.Total <= 0 ||
			r.FS == "" || r.NoReplace != Yes {
			t.Errorf("probe of %s: got %+v", path, r)
		}
		if (r.Direct == Yes) != (r.CuFile == "ok") {
			t.Errorf("%s: cuFile is asked about direct files: %+v", path, r)
		}
	}
	if _, err := os.Stat(filepath.Join(disk, "a")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the missing root was made: %v", err)
	}
	if list, _ := os.ReadDir(disk); len(list) != 1 {
		t.Errorf("left behind: %v", list)
	}
	if r := s.probeRoot(filepath.Join(disk, "a", "b"), nil); r.Parent != filepath.Join(disk, "a") || r.Writable ||
		r.unusable() == "" {
		t.Errorf("a root without a parent: %+v", r)
	}
	if r := s.probeRoot(file, nil); r.Failed == "" || r.Writable {
		t.Errorf("a file is no root: %+v", r)
	}
	if r := s.probeRoot(filepath.Join(file, "x"), nil); r.Failed == "" {
		t.Errorf("nor is what would be below one: %+v", r)
	}
	var st unix.Statfs_t
	if unix.Statfs("/dev/shm", &st) == nil && st.Type == unix.TMPFS_MAGIC {
		if r := s.probeRoot("/dev/shm", nil); r.FS != "tmpfs" || r.Writable != (unix.Access("/dev/shm", unix.W_OK) == nil) || r.Device != "" {
			t.Errorf("tmpfs: %+v", r)
		}
	}
}

// Check says which engines share what a root holds, and what it costs.
func TestSharedModelsAreListed(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, pieceformat.NamespacesDir)
	testenv.OK(t, os.MkdirAll(dir, 0o700))
	for i, units := range []int{8, 0, 12, 8} {
		ns := kv.Namespace{Model: "llama", Revision: fmt.Sprint(i), DType: "bf16", KeyBytes: 32, TokensPerBlock: 1, Units: units,
			Groups: []kv.Group{{Geometry: kv.Uniform(2, 1, 1, 64)}}}
		testenv.OK(t, os.WriteFile(filepath.Join(dir, ns.Digest().String()), []byte(ns.Text()), 0o600))
	}
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "damaged"), []byte("units=4"), 0o600))
	r := system{"/"}.probeRoot(root, nil)
	c := config.Default()
	c.Roots = []config.Root{{Path: root, Capacity: 1 << 20}}
	var says strings.Builder
	for _, f := range Judge("test", c, 0, &Facts{Roots: []Root{r}}).Findings {
		says.WriteString(f.Says + "\n")
	}
	for _, want := range []string{"TP 1, 2, 4, 8 share chunks of llama, which have 8 files", "TP 1, 2, 4 share chunks of llama, which have 12 files"} {
		if strings.Count(says.String(), want) != 1 || len(r.Shared) != 2 {
			t.Errorf("check says of %+v\n%swant once: %s", r.Shared, &says, want)
		}
	}
}

// The mount of a tmpfs is the longest above the directory, and its huge pages are what its options and the machine say.
func TestTmpfsIsRead(t *testing.T) {
	const info = `22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:25 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=1024k,inode64
31 22 0:26 / /mnt/a\040b rw - tmpfs none rw,huge=always
32 31 0:27 / /mnt/a\040b/small rw master:1 shared:2 - tmpfs none rw,huge=advise
33 22 0:28 / /mnt/within rw - tmpfs none rw,huge=within_size,size=1g
34 22 0:29 / /mnt rw - ext4 none rw
broken line
`
	for _, c := range []struct {
		dir, shmem, mount string
		huge              Answer
	}{
		{"/dev/shm", "", "/dev/shm", No},
		{"/dev/shm/kv", "always within_size advise [never] deny force", "/dev/shm", No},
		{"/dev/shm/kv", "always within_size advise never deny [force]", "/dev/shm", Yes},
		{"/dev/shmkv", "", "", Unknown},
		{"/mnt/a b/kv", "", "/mnt/a b", Yes},
		{"/mnt/a b", "always within_size advise never [deny] force", "/mnt/a b", No},
		{"/mnt/a b/small/x", "", "/mnt/a b/small", No},
		{"/mnt/within", "", "/mnt/within", Yes},
	} {
		top := t.TempDir()
		for name, text := range map[string]string{
			"proc/self/mountinfo": info, "sys/kernel/mm/transparent_hugepage/shmem_enabled": c.shmem,
		} {
			path := filepath.Join(top, name)
			testenv.OK(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)))
		}
		if mount, huge := (system{top}).tmpfs(c.dir); mount != c.mount || huge != c.huge {
			t.Errorf("%s with %q: %q, %v; want %q, %v", c.dir, c.shmem, mount, huge, c.mount, c.huge)
		}
	}
}

// The machine's facts come from the kernel's files.
func TestMachineIsRead(t *testing.T) {
	top := t.TempDir()
	for name, text := range map[string]string{
		"proc/sys/kernel/osrelease":  "6.9.1-test\n",
		"proc/meminfo":               "MemTotal:       1024 kB\nMemAvailable:    512 kB\nHugePages_Free:       3\nHugepagesize:       2048 kB\n",
		"proc/modules":               "nvidia 1 0 - Live 0x0\nnvidia_fs 1 0 - Live 0x0\n",
		"boot/config-6.9.1-test":     "# CONFIG_X is not set\nCONFIG_PCI_P2PDMA=y\n",
		"run/udev/data/b259:0":       "E:ID_FS_TYPE=ext4\n",
		"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.3.0\n",
		"proc/driver/nvidia/params":  "Mobile: 0\nRegistryDwords: \"RMForceStaticBar1=1;\"\n",
	} {
		path := filepath.Join(top, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	s := system{top}
	m := s.machine()
	if m.Kernel != "6.9.1-test" || m.MemoryBytes != 1<<20 || m.FreeBytes != 1<<19 || m.HugePages != 3 ||
		m.P2PDMA != Yes || !m.NVFS || !m.Udev {
		t.Errorf("machine: got %+v", m)
	}
	if version, open, params := s.driverModule(); version != "580.95.05" || open != Yes ||
		params != "RMForceStaticBar1=1;" {
		t.Errorf("kernel module: got version %s, open %s, settings %s", version, open, params)
	}
	bare := system{t.TempDir()}
	if m := bare.machine(); m.P2PDMA != Unknown || m.NVFS || m.Udev {
		t.Errorf("machine without files: got %+v, want all unknown", m)
	}
	if version, open, _ := bare.driverModule(); version != "" || open != Unknown {
		t.Error(version, open)
	}
}

// With the double of the NVIDIA libraries its GPU is found and cuFile is tested. Without any library the rest is
// reported.
func TestProbeWithAndWithoutAGPU(t *testing.T) {
	w := config.Default()
	w.Roots = []config.Root{{Path: t.TempDir(), Capacity: 1 << 20}}
	double := gdstest.Build(t).Path
	f, err := probe(context.Background(), w, system{"/"}, []string{double}, []string{double})
	testenv.OK(t, err)
	if f.Driver.Failed != "" || len(f.GPUs) == 0 || f.GPUs[0].Pinned != Yes || f.GPUs[0].Failed != "" ||
		f.CuFile.Failed != "" {
		t.Errorf("probe with the double: got %+v", f)
	}
	if f.Roots[0].Direct == Yes && f.Roots[0].CuFile != "ok" {
		t.Errorf("root: got %+v, want cuFile to accept its files", f.Roots[0])
	}
	w.GDS.MaxDeviceMemory = 0 // then it is not even loaded
	f, err = probe(context.Background(), w, system{"/"}, []string{double}, []string{"/nonexistent/libcufile.so"})
	if err != nil || len(f.GPUs) == 0 || f.CuFile != (CuFile{Forbid: true}) || f.Roots[0].CuFile != "" {
		t.Errorf("probe without cuFile: got %+v, %v", f, err)
	}
	w.GDS.MaxDeviceMemory = 1 << 30
	f, err = probe(context.Background(), w, system{"/"}, []string{"/nonexistent/libcuda.so"}, nil)
	testenv.OK(t, err)
	if r := Judge("test", w, 0, f); f.Driver.Failed == "" || r.Problems() != nil || r.Verdicts[0].Route != RouteStaged {
		t.Errorf("report without a driver: got %+v", r)
	}
	w.GDS.CUDA = config.CUDAOff
	if f, err = probe(context.Background(), w, system{"/"}, nil, nil); err != nil || !f.Driver.Forbid ||
		f.Driver.Failed != "" {
		t.Errorf("probe with CUDA off: got %+v, %v", f, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	stop()
	if _, err := probe(ctx, w, system{"/"}, nil, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	var b strings.Builder
	if err := Judge("test", w, 0, f).Write(&b); err != nil || !strings.Contains(b.String(), "not probed") {
		t.Error(err, b.String())
	}
}

// TestBucketsAreTried: a check tries each right, names the ones that lack, and leaves nothing behind.
func TestBucketsAreTried(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	c := config.Default()
	c.GDS.CUDA = config.CUDAOff
	c.Roots = []config.Root{{Path: "s3://bucket/a", Capacity: 1 << 30, Endpoint: p.URL, PathStyle: true}}
	for name, k := range map[string]struct {
		rules         []s3double.Rule
		quirk         string
		unconditional bool
		shared        bool
		finds         []string
	}{
		"all is right":           {},
		"no conditional writes":  {unconditional: true, finds: []string{"no conditional writes"}},
		"weak ETags":             {quirk: s3double.WeakETags},
		"no condition holds":     {quirk: s3double.NoMatch, finds: []string{"no conditional writes"}},
		"no ranges":              {quirk: s3double.WholeBodies, finds: []string{"cannot get a part of an object"}},
		"nothing to share it by": {unconditional: true, shared: true, finds: []string{"the bucket cannot be shared"}},
		"rights":                 {rules: []s3double.Rule{{Fault: s3double.Denied, Method: "DELETE"}}, finds: []string{"cannot remove an object", "cannot end a multipart upload"}},
		"no lists":               {rules: []s3double.Rule{{Fault: s3double.Denied, In: "list-type"}}, finds: []string{"cannot list objects"}},
		"no uploads":             {rules: []s3double.Rule{{Fault: s3double.Denied, Method: "POST"}}, finds: []string{"cannot begin a multipart upload"}},
	} {
		s.Quirk = k.quirk
		s.Unconditional, c.Roots[0].Shared = k.unconditional, k.shared
		p.Set(k.rules...)
		facts, err := Probe(t.Context(), c)
		testenv.OK(t, err)
		var text strings.Builder
		r := Judge("test", c, 0, facts)
		testenv.OK(t, r.Write(&text))
		for _, want := range k.finds {
			if !strings.Contains(text.String(), want) {
				t.Errorf("%s: the report does not say %q:\n%s", name, want, text.String())
			}
		}
		if about := "root s3://bucket/a"; len(k.finds) == 0 && strings.Contains(text.String(), about+":") || !strings.Contains(text.String(), "first byte after") {
			t.Errorf("%s: the report finds something, or tells no speed:\n%s", name, text.String())
		}
		if left := len(s.Objects()); left > 0 && len(k.rules) == 0 {
			t.Errorf("%s: %d objects are left", name, left)
		}
		p.Set()
		for key := range s.Objects() {
			s.Set(key, nil)
		}
	}
}
