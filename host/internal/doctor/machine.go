package doctor

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// system reads /proc, /sys and /run below a directory, which is "/" except in tests.
type system struct{ top string }

func (s system) read(name string) string {
	b, err := os.ReadFile(filepath.Join(s.top, name))
	if err != nil {
		return ""
	}
	return string(b)
}

func (s system) machine() Machine {
	m := Machine{Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Memlock: -1, P2PDMA: Unknown}
	m.Kernel = strings.TrimSpace(s.read("proc/sys/kernel/osrelease"))
	info := s.fields("proc/meminfo")
	m.MemoryBytes, m.FreeBytes, _ = staging.MemoryBelow(s.top)
	m.Group = m.MemoryBytes < info["MemTotal"]<<10
	m.HugePages, m.HugePage = info["HugePages_Free"], info["Hugepagesize"]<<10
	m.Transparent = staging.Transparent(s.read("sys/kernel/mm/transparent_hugepage/enabled"))
	if nodes, err := staging.SystemTopology().Nodes(); err == nil {
		m.Nodes = len(nodes)
	}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) == nil && limit.Cur != unix.RLIM_INFINITY {
		m.Memlock = int64(limit.Cur)
	}
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		m.OpenFiles = int64(min(limit.Max, 1<<40)) // this process raises its limit to the hard one
	}
	m.P2PDMA = s.kernelHas(m.Kernel, "CONFIG_PCI_P2PDMA")
	for line := range strings.Lines(s.read("proc/modules")) {
		m.NVFS = m.NVFS || strings.HasPrefix(line, "nvidia_fs ")
	}
	records, err := os.ReadDir(filepath.Join(s.top, "run/udev/data"))
	m.Udev = err == nil && len(records) > 0
	return m
}

// fields parses lines of "name: number ...".
func (s system) fields(name string) map[string]int64 {
	out := map[string]int64{}
	for line := range strings.Lines(s.read(name)) {
		key, rest, _ := strings.Cut(line, ":")
		if f := strings.Fields(rest); len(f) > 0 {
			out[key], _ = strconv.ParseInt(f[0], 10, 64)
		}
	}
	return out
}

// kernelHas looks up an option in the kernel's configuration, if the kernel publishes it.
func (s system) kernelHas(release, option string) Answer {
	var text io.Reader
	if b := s.read("proc/config.gz"); b != "" {
		z, err := gzip.NewReader(strings.NewReader(b))
		if err != nil {
			return Unknown
		}
		text = z
	} else if b := s.read("boot/config-" + release); b != "" {
		text = strings.NewReader(b)
	} else {
		return Unknown
	}
	for lines := bufio.NewScanner(text); lines.Scan(); {
		if bytes.HasPrefix(lines.Bytes(), []byte(option+"=y")) {
			return Yes
		}
	}
	return No
}

// driverModule reads the NVIDIA kernel module's version and settings.
func (s system) driverModule() (version string, open Answer, params string) {
	text := s.read("proc/driver/nvidia/version")
	if text == "" {
		return "", Unknown, ""
	}
	line, _, _ := strings.Cut(text, "\n")
	open = No
	if strings.Contains(line, "Open Kernel Module") {
		open = Yes
	}
	for _, word := range strings.Fields(line) {
		if strings.Count(word, ".") >= 1 && word[0] >= '0' && word[0] <= '9' {
			version = word
			break
		}
	}
	for line := range strings.Lines(s.read("proc/driver/nvidia/params")) {
		if rest, ok := strings.CutPrefix(line, "RegistryDwords:"); ok {
			params = strings.Trim(strings.TrimSpace(rest), `"`)
		}
	}
	return version, open, params
}

// device returns the name of a block device. It is empty for a number without a device.
func (s system) device(dev uint64) string {
	link := filepath.Join(s.top, "sys/dev/block",
		strconv.Itoa(int(unix.Major(dev)))+":"+strconv.Itoa(int(unix.Minor(dev))))
	if real, err := filepath.EvalSymlinks(link); err == nil {
		return filepath.Base(real)
	}
	return ""
}
