package doctor

import (
	"strconv"
	"strings"

	"github.com/kvhost/kvhost/host/internal/s3fs"
)

// Facts are what a probe found.
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
	MemoryBytes int64  `json:"memory_bytes"`  // of the machine, or of the control group
	Group       bool   `json:"control_group"` // it has less than the machine
	FreeBytes   int64  `json:"free_bytes"`    // available without swapping
	Nodes       int    `json:"numa_nodes"`
	Memlock     int64  `json:"memlock_bytes"` // -1: no limit
	OpenFiles   int64  `json:"open_files"`
	HugePages   int64  `json:"huge_pages_free"`
	HugePage    int64  `json:"huge_page_bytes"`
	Transparent bool   `json:"transparent_huge_pages"` // for memory that asks for them
	P2PDMA      Answer `json:"kernel_p2pdma"`          // CONFIG_PCI_P2PDMA
	NVFS        bool   `json:"nvidia_fs"`              // the module is loaded
	Udev        bool   `json:"udev"`                   // there is a database of devices
}

// Answer is yes, no, or unknown.
type Answer string

const (
	Yes     Answer = "yes"
	No      Answer = "no"
	Unknown Answer = "unknown"
)

// Driver is libcuda.
type Driver struct {
	CUDA   int    `json:"cuda"`   // version, 1000*major + 10*minor; 0 without a driver
	Kernel string `json:"kernel"` // the kernel module's version
	Open   Answer `json:"open"`   // kernel modules with published source, which peer-to-peer DMA needs
	Params string `json:"params"` // the module's registry settings
	Failed string `json:"failed"` // why there is none
	Forbid bool   `json:"forbid"` // by configuration
}

// CuFile is libcufile.
type CuFile struct {
	Version int    `json:"version"` // 1000*major + 10*minor; 0 without
	NVFS    string `json:"nvfs"`    // version of nvidia-fs that it uses; empty: none
	Compat  bool   `json:"compat"`  // it may work without peer-to-peer DMA
	Failed  string `json:"failed"`
	Forbid  bool   `json:"forbid"` // by configuration
}

type GPU struct {
	UUID   string `json:"uuid"`
	Name   string `json:"name"`
	PCI    string `json:"pci"`
	Node   int    `json:"numa_node"` // -1: unknown
	Bytes  int64  `json:"bytes"`
	Copies string `json:"copies"` // how pages are gathered and scattered
	Pinned Answer `json:"pinned"` // host memory could be page-locked
	Failed string `json:"failed"` // why it cannot be used
}

// Root is a root's directory. Of a root in memory only Path and Memory are known: its memory is the machine's. Of one in a bucket
// only Path and Bucket.
type Root struct {
	Path   string `json:"path"`
	Memory bool   `json:"memory,omitempty"`

	Bucket *s3fs.Trial `json:"bucket,omitempty"`

	Tried     string `json:"tried"`            // the directory that was tried: Path, or the nearest above it that exists
	Missing   bool   `json:"missing"`          // it does not exist yet
	Parent    string `json:"parent,omitempty"` // the directory in which it would be made, when that is missing, too
	FS        string `json:"fs"`
	Mount     string `json:"mount,omitempty"`      // of tmpfs: where it is mounted
	HugePages Answer `json:"huge_pages,omitempty"` // of tmpfs: its files get them
	Device    string `json:"device"`
	Node      int    `json:"numa_node"`
	Total     int64  `json:"total_bytes"`
	Available int64  `json:"available_bytes"`
	Writable  bool   `json:"writable"`
	Direct    Answer `json:"direct_io"`    // written and read back past the page cache
	MemAlign  int    `json:"memory_align"` // of direct I/O, as the kernel says; 0: it does not
	OffAlign  int    `json:"offset_align"`
	NoReplace Answer `json:"rename_noreplace"`
	CuFile    string `json:"cufile"` // of registering a file with cuFile: "ok", an error, or empty when not tried
	Failed    string `json:"failed"`

	Shared []SharedModel `json:"shared,omitempty"` // by engines of several tensor-parallel sizes
}

// SharedModel is a model with chunks that engines of several tensor-parallel sizes share.
type SharedModel struct {
	Model string `json:"model"`
	Units int    `json:"units"` // pieces of a chunk
}

// sizes lists the sizes that share the chunks, of those that are powers of two.
func (m SharedModel) sizes() string {
	var list []string
	for n := 1; n <= m.Units; n *= 2 {
		if m.Units%n == 0 {
			list = append(list, strconv.Itoa(n))
		}
	}
	return strings.Join(list, ", ")
}
