package staging

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MachineMemory returns the memory of the machine or the limit of this process's control group, whichever is less, and
// its available part, in bytes. known is false if the kernel does not report available memory.
func MachineMemory() (total, available int64, known bool) { return MemoryBelow("/") }

// controlGroups describes a version of the kernel's control groups: the place of its memory controller and the names of
// its files.
type controlGroups struct {
	mount, limit, used string
	cached             string // the line of memory.stat that counts memory that the kernel can reclaim at once
}

var (
	groups1 = controlGroups{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "}
	groups2 = controlGroups{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "}
)

// MemoryBelow is [MachineMemory] with the kernel's file systems below a directory.
func MemoryBelow(top string) (total, available int64, known bool) {
	if total, known = field(top, "proc/meminfo", "MemTotal:"); known {
		total <<= 10
	} else { // without /proc
		var info unix.Sysinfo_t
		_ = unix.Sysinfo(&info) // cannot fail: the pointer is good
		total = int64(uint64(info.Totalram) * uint64(info.Unit))
	}
	available, known = field(top, "proc/meminfo", "MemAvailable:")
	available <<= 10
	within := func(c controlGroups, group string) {
		for ; ; group = filepath.Dir(group) { // an ancestor may have a lower limit
			dir := filepath.Join(c.mount, group)
			if limit, err := number(top, filepath.Join(dir, c.limit)); err == nil {
				total = min(total, limit)
				if used, err := number(top, filepath.Join(dir, c.used)); err == nil {
					cached, _ := field(top, filepath.Join(dir, "memory.stat"), c.cached)
					available = min(available, limit-used+cached)
				}
			}
			if group == "" || group == "/" || group == "." {
				return
			}
		}
	}
	// A line is "id:controllers:path"; version 2 has no controllers in it. In a container the path can be one of the
	// machine that is not mounted: the limit is then that of the mount.
	for line := range strings.Lines(text(top, "proc/self/cgroup")) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, _ := strings.Cut(rest, ":")
		switch {
		case controllers == "":
			within(groups2, group)
		case slices.Contains(strings.Split(controllers, ","), "memory"):
			within(groups1, group)
		}
	}
	return total, max(0, available), known
}

// field returns the number in the line of a file that begins with name.
func field(top, file, name string) (n int64, ok bool) {
	for line := range strings.Lines(text(top, file)) {
		if rest, found := strings.CutPrefix(line, name); found {
			if words := strings.Fields(rest); len(words) > 0 {
				n, err := strconv.ParseInt(words[0], 10, 64)
				return n, err == nil
			}
		}
	}
	return 0, false
}

func number(top, file string) (int64, error) {
	return strconv.ParseInt(strings.TrimSpace(text(top, file)), 10, 64)
}

func text(top, file string) string {
	b, _ := os.ReadFile(filepath.Join(top, file)) // a missing file means that there is no such limit
	return string(b)
}
