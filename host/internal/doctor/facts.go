package doctor

import (
	"strconv"
	"strings"

	"github.com/kvhost/kvhost/host/internal/s3fs"
)

// Facts are the results of a probe.
type Facts struct {
	Machine Machine `json:"machine"`
	Driver  Driver  `json:"driver"`
	CuFile  CuFile  `json:"cufile"`
	GPUs    []GPU   `json:"gpus"`
	Roots   []Root  `json:"roots"`
}

// Machine is the machine as a whole.
type Machine struct {
	Kernel      string `json:"kernel"`
	Arch        string `json:"arch"`
	CPUs        int    `json:"cpus"`
	MemoryBytes int64  `json:"memory_bytes"`  // memory of the machine, or of its control group if that has less
	Group       bool   `json:"control_group"` // MemoryBytes is that of the control group
	FreeBytes   int64  `json:"free_bytes"`    // available without swapping
	Nodes       int    `json:"numa_nodes"`
	Memlock     int64  `json:"memlock_bytes"` // -1 means no limit
	OpenFiles   int64  `json:"open_files"`
	HugePages   int64  `json:"huge_pages_free"`
	HugePage    int64  `json:"huge_page_bytes"`
	Transparent bool   `json:"transparent_huge_pages"` // for memory that requests them
	P2PDMA      Answer `json:"kernel_p2pdma"`          // CONFIG_PCI_P2PDMA
	NVFS        bool   `json:"nvidia_fs"`              // the module nvidia-fs is loaded
	Udev        bool   `json:"udev"`                   // there is a database of devices
}

// Answer is yes, no, or unknown.
type Answer string

const (
	Yes     Answer = "yes"
	No      Answer = "no"
	Unknown Answer = "unknown"
)

// Driver describes libcuda.
type Driver struct {
	CUDA   int    `json:"cuda"`   // version, 1000*major + 10*minor; 0 without a driver
	Kernel string `json:"kernel"` // version of the kernel module
	Open   Answer `json:"open"`   // the kernel module has published source, which peer-to-peer DMA requires
	Params string `json:"params"` // registry settings of the kernel module
	Failed string `json:"failed"` // why there is no driver
	Forbid bool   `json:"forbid"` // the configuration forbids it
}

// CuFile describes libcufile.
type CuFile struct {
	Version int    `json:"version"` // 1000*major + 10*minor; 0 if there is none
	NVFS    string `json:"nvfs"`    // version of nvidia-fs that it uses; empty if it uses none
	Compat  bool   `json:"compat"`  // it may work without peer-to-peer DMA
	Failed  string `json:"failed"`
	Forbid  bool   `json:"forbid"` // the configuration forbids it
}

type GPU struct {
	UUID   string `json:"uuid"`
	Name   string `json:"name"`
	PCI    string `json:"pci"`
	Node   int    `json:"numa_node"` // -1 means unknown
	Bytes  int64  `json:"bytes"`
	Copies string `json:"copies"` // way in which pages are gathered and scattered
	Pinned Answer `json:"pinned"` // whether host memory could be page-locked
	Failed string `json:"failed"` // why the GPU cannot be used
}

// Root describes a root's directory. For a root in memory only Path and Memory are set, because its memory is described by Machine. For a
// root in a bucket only Path and Bucket are set.
type Root struct {
	Path   string `json:"path"`
	Memory bool   `json:"memory,omitempty"`

	Bucket *s3fs.Trial `json:"bucket,omitempty"`

	Tried     string `json:"tried"`            // directory that was tested: Path, or the nearest existing directory above it
	Missing   bool   `json:"missing"`          // it does not exist yet
	Parent    string `json:"parent,omitempty"` // directory above a missing Path, if it is missing, too
	FS        string `json:"fs"`
	Mount     string `json:"mount,omitempty"`      // mount point, for tmpfs
	HugePages Answer `json:"huge_pages,omitempty"` // for tmpfs: whether files get huge pages
	Device    string `json:"device"`
	Node      int    `json:"numa_node"`
	Total     int64  `json:"total_bytes"`
	Available int64  `json:"available_bytes"`
	Writable  bool   `json:"writable"`
	Direct    Answer `json:"direct_io"`    // a file was written and read back past the page cache
	MemAlign  int    `json:"memory_align"` // alignment for direct I/O reported by the kernel; 0 if it reports none
	OffAlign  int    `json:"offset_align"`
	NoReplace Answer `json:"rename_noreplace"`
	CuFile    string `json:"cufile"` // result of registering a file with cuFile: "ok" or an error; empty if not tried
	Failed    string `json:"failed"`

	Shared []SharedModel `json:"shared,omitempty"` // models shared by engines of several tensor-parallel sizes
}

// SharedModel is a model with chunks that engines of several tensor-parallel sizes share.
type SharedModel struct {
	Model string `json:"model"`
	Units int    `json:"units"` // number of pieces of a chunk
}

// sizes lists the tensor-parallel sizes that share the chunks. Sizes are powers of two.
func (m SharedModel) sizes() string {
	var list []string
	for n := 1; n <= m.Units; n *= 2 {
		if m.Units%n == 0 {
			list = append(list, strconv.Itoa(n))
		}
	}
	return strings.Join(list, ", ")
}
