package gds

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/kvhost/kvhost/abi/testenv"
	"golang.org/x/sys/unix"
)

func openCuFile(t *testing.T, g *GPU, path ...string) *CuFile {
	t.Helper()
	c, err := LoadCuFile(path...)
	testenv.OK(t, err)
	on(t, g, c.Open)
	t.Cleanup(func() {
		if g.Err() == nil {
			on(t, g, c.Close)
		}
	})
	return c
}

// cuFileOf is the double's library, or with KVHOST_TEST_GPU set the real one.
func cuFileOf(t *testing.T, g *GPU) *CuFile {
	t.Helper()
	if os.Getenv("KVHOST_TEST_GPU") != "" {
		return openCuFile(t, g)
	}
	return openCuFile(t, g, g.driver.lib.name)
}

func TestCuFileSays(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	c := cuFileOf(t, g)
	v, err := c.Version()
	if err != nil || v < 1000 {
		t.Errorf("version %d, %v", v, err)
	}
	p, err := c.Properties()
	if err != nil || p.MaxDirectIOKB == 0 {
		t.Errorf("properties: got %+v, %v, want a limit of direct I/O", p, err)
	}
	if err := c.SetBool(AllowCompatMode, true); err == nil {
		t.Error("a parameter was taken by an open driver")
	}
	t.Logf("version %d, %+v", v, p)
}

func TestCuFileDriverFails(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	lib := openCuFile(t, g, double.Path)
	double.Rules("cuFileDriverOpen:code=5001")
	if err := lib.Open(nil); err == nil || !strings.Contains(err.Error(), "CU_FILE_DRIVER_NOT_INITIALIZED (5001)") {
		t.Error(err)
	}
	if _, err := LoadCuFile("libkvhost-no-such.so"); !errors.Is(err, ErrNoCuFile) {
		t.Error(err)
	}
}

func TestStatsNameTheRoute(t *testing.T) {
	g, _ := open(t, Config{Threads: 1})
	c := cuFileOf(t, g)
	testenv.OK(t, c.StartStats())
	if r, err := c.Stats(); err != nil {
		t.Errorf("statistics: got %+v, %v", r, err)
	}
	for _, k := range []struct {
		r    Routes
		want string
	}{
		{Routes{}, "nothing"}, {Routes{Reads: 2, PosixReads: 2}, "compatibility"},
		{Routes{Writes: 1, P2PWrites: 1}, "peer"},
		{Routes{Reads: 1, NVFSReads: 1}, "nvidia-fs"}, {Routes{Reads: 2, NVFSReads: 1, PosixReads: 1}, "mixed"},
	} {
		if !strings.Contains(k.r.String(), k.want) {
			t.Errorf("text of %+v: got %s", k.r, k.r)
		}
	}
}

func TestPrivateConfigKeepsTheMachines(t *testing.T) {
	base := []byte(`{
    // NOTE : logging
    "logging": { "level": "ERROR" /* not a comment of cuFile's, so an error */ },
}`)
	if _, err := privateConfig(base, "/log"); err == nil {
		t.Error("what is not JSON is accepted")
	}
	base = []byte(`{
    // a comment with "quotes"
    "logging": { "level": "ERROR" }, // "dir": "/tmp"
    "properties": { "allow_compat_mode": false, "rdma_dev_addr_list": [ "10.0.0.1" ] },
    "fs": { "lustre": { "mount_table": { "http://a\"//b": 1 } } }
}`)
	text, err := privateConfig(base, "/log")
	testenv.OK(t, err)
	var got struct {
		Logging    struct{ Level, Dir string }
		Properties struct {
			Compat bool     `json:"allow_compat_mode"`
			Addrs  []string `json:"rdma_dev_addr_list"`
		}
		FS struct {
			Lustre struct {
				Mounts map[string]int `json:"mount_table"`
			}
		}
	}
	testenv.OK(t, json.Unmarshal(text, &got))
	if got.Logging.Level != "ERROR" || got.Logging.Dir != "/log" || !got.Properties.Compat ||
		len(got.Properties.Addrs) != 1 ||
		got.FS.Lustre.Mounts[`http://a"//b`] != 1 {
		t.Errorf("private configuration: got %s", text)
	}
	if text, err = privateConfig(nil, "/log"); err != nil || !json.Valid(text) {
		t.Errorf("configuration of nothing: got %s, %v, want JSON", text, err)
	}
}

func TestConfigureWithAndWithoutParameters(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	c, err := LoadCuFile(g.driver.lib.name)
	testenv.OK(t, err)
	dir := t.TempDir()
	if err := c.Configure(dir); err != nil || double.Calls("cuFileSetParameterString") != 1 ||
		double.Calls("cuFileSetParameterBool") != 1 {
		t.Errorf("configure: %v, want one call of each setter", err)
	}
	c.fn.setString, c.fn.setBool = function{}, function{} // as an old library
	base := filepath.Join(dir, "base.json")
	testenv.OK(t, os.WriteFile(base, []byte(`{"fs": {"generic": {}}}`), 0o600))
	t.Setenv(cuFileConfigEnv, base)
	testenv.OK(t, c.Configure(dir))
	text, err := os.ReadFile(os.Getenv(cuFileConfigEnv))
	var tree map[string]map[string]any
	if err != nil || json.Unmarshal(text, &tree) != nil || tree["logging"]["dir"] != dir ||
		tree["fs"]["generic"] == nil {
		t.Errorf("written configuration: got %s, %v, want the log directory and fs.generic", text, err)
	}
	if err := c.Configure(filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that does not exist is no error")
	}
}

// TestSetDefault asks C for the variable, as a driver does.
func TestSetDefault(t *testing.T) {
	const name = "KVHOST_TEST_SET_DEFAULT"
	t.Cleanup(func() { os.Unsetenv(name) })
	getenv, err := purego.Dlsym(purego.RTLD_DEFAULT, "getenv")
	testenv.OK(t, err)
	for _, value := range []string{"32", "8"} { // the second finds it set
		testenv.OK(t, SetDefault(name, value))
		key := append([]byte(name), 0)
		at, _, _ := purego.SyscallN(getenv, uintptr(unsafe.Pointer(&key[0])))
		if at == 0 {
			t.Fatal("C does not have it")
		}
		if got := unix.BytePtrToString(*(**byte)(unsafe.Pointer(&at))); got != "32" || os.Getenv(name) != "32" {
			t.Errorf("after %s: C has %q, Go %q, want 32", value, got, os.Getenv(name))
		}
	}
}

// headerLayouts are what a program compiled against the headers printed, by the first version of cuFile that it is of.
var headerLayouts = map[int]string{1150: "layout/testdata/layout.txt", 1190: "layout/testdata/layout-1.19.txt"}

func headerLayout(t *testing.T, version int) map[string]uintptr {
	t.Helper()
	f, err := os.Open(headerLayouts[version])
	testenv.OK(t, err)
	defer f.Close()
	header := map[string]uintptr{}
	for s := bufio.NewScanner(f); s.Scan(); {
		var name string
		var value uintptr
		if _, err := fmt.Sscan(s.Text(), &name, &value); err != nil {
			t.Fatal(err)
		}
		header[name] = value
	}
	return header
}

// The headers' layouts beside what is passed to the libraries, and what is read of their answers.
func TestLayoutsAreTheHeaders(t *testing.T) {
	for version := range headerLayouts {
		checkLayout(t, version, headerLayout(t, version))
	}
}

func checkLayout(t *testing.T, version int, header map[string]uintptr) {
	var d cuFileDescr
	var p cuFileProperties
	for name, have := range map[string]uintptr{
		"CUfileError_t.size": 8, "CUfileError_t.err": 0, "CUfileError_t.cu_err": 4,
		"CUfileDescr_t.size": unsafe.Sizeof(d), "CUfileDescr_t.type": unsafe.Offsetof(d.Type),
		"CUfileDescr_t.handle": unsafe.Offsetof(d.FD), "CUfileDescr_t.fs_ops": unsafe.Offsetof(d.FSOps),
		"CUfileDrvProps_t.size": unsafe.Sizeof(p), "CUfileDrvProps_t.nvfs.major_version": unsafe.Offsetof(p.Major),
		"CUfileDrvProps_t.nvfs.minor_version":         unsafe.Offsetof(p.Minor),
		"CUfileDrvProps_t.nvfs.poll_thresh_size":      unsafe.Offsetof(p.PollThreshold),
		"CUfileDrvProps_t.nvfs.max_direct_io_size":    unsafe.Offsetof(p.MaxDirectIO),
		"CUfileDrvProps_t.nvfs.dstatusflags":          unsafe.Offsetof(p.Status),
		"CUfileDrvProps_t.nvfs.dcontrolflags":         unsafe.Offsetof(p.Control),
		"CUfileDrvProps_t.fflags":                     unsafe.Offsetof(p.Features),
		"CUfileDrvProps_t.max_device_cache_size":      unsafe.Offsetof(p.MaxDeviceCache),
		"CUfileDrvProps_t.per_buffer_cache_size":      unsafe.Offsetof(p.PerBufferCache),
		"CUfileDrvProps_t.max_device_pinned_mem_size": unsafe.Offsetof(p.MaxPinned),
		"CUfileDrvProps_t.max_batch_io_size":          unsafe.Offsetof(p.MaxBatch),
		"CUfileDrvProps_t.max_batch_io_timeout_msecs": unsafe.Offsetof(p.MaxBatchMilli),
		"CU_FILE_HANDLE_TYPE_OPAQUE_FD":               1, "CU_FILE_CUDA_DRIVER_ERROR": fileCUDAError,
		"CU_FILE_SUCCESS": 0,
		"CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE": AllowCompatMode, "CUFILE_PARAM_LOG_DIR": LogDir,
		"CUFILE_PARAM_PROFILE_STATS": StatsLevel,
		"CUfilePerGpuStats_t.size":   perGPUBytes, "CUfileStatsLevel3_t.num_gpus": uintptr(statsGPUs(version)),
		"CUfileStatsLevel3_t.per_gpu_stats": uintptr(statsGPUs(version)) + 8,
		"CUfilePerGpuStats_t.n_total_reads": totalReads, "CUfilePerGpuStats_t.n_p2p_reads": totalReads + 8,
		"CUfilePerGpuStats_t.n_nvfs_reads": totalReads + 16, "CUfilePerGpuStats_t.n_posix_reads": totalReads + 24,
		"CUfilePerGpuStats_t.n_total_writes": totalWrites, "CUfilePerGpuStats_t.n_p2p_writes": totalWrites + 8,
		"CUfilePerGpuStats_t.n_nvfs_writes": totalWrites + 16, "CUfilePerGpuStats_t.n_posix_writes": totalWrites + 24,
		"CUipcMemHandle.size":                 ipcHandleBytes,
		"CUuuid.size":                         unsafe.Sizeof(UUID{}),
		"CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL": attributeDeviceOrdinal,
		"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS":  ipcLazyPeerAccess,
	} {
		if want, ok := header[name]; !ok || want != have {
			t.Errorf("cuFile %d: %s: %d, the header has %d (%v)", version, name, have, want, ok)
		}
	}
	if size := header["CUfileStatsLevel3_t.size"]; size > statsMost {
		t.Errorf("cuFile %d: its statistics have %d bytes, and %d are given to it", version, size, statsMost)
	}
}

// Each counter of every GPU is read from where the header has it.
func TestStatsAreReadByTheHeader(t *testing.T) {
	for version := range headerLayouts {
		header := headerLayout(t, version)
		raw := make([]byte, statsMost)
		binary.LittleEndian.PutUint32(raw[header["CUfileStatsLevel3_t.num_gpus"]:], 2)
		for g := range uintptr(2) {
			for i, name := range []string{"total_reads", "p2p_reads", "nvfs_reads", "posix_reads", "total_writes",
				"p2p_writes", "nvfs_writes", "posix_writes"} {
				at := header["CUfileStatsLevel3_t.per_gpu_stats"] + g*header["CUfilePerGpuStats_t.size"] + header["CUfilePerGpuStats_t.n_"+name]
				binary.LittleEndian.PutUint64(raw[at:], uint64(i+1)<<(8*g))
			}
		}
		want := Routes{0x101, 0x202, 0x303, 0x404, 0x505, 0x606, 0x707, 0x808}
		if got := parseStats(raw[statsGPUs(version):]); got != want {
			t.Errorf("cuFile %d: %+v, want %+v", version, got, want)
		}
	}
}
