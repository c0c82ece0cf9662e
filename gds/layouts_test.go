package gds

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"testing"
	"unsafe"

	"github.com/kvhost/kvhost/abi/testenv"
)

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
