package staging

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MachineMemory returns the bytes of memory of the machine, or the limit of this process's control group, whichever is less, and
// what of it is available. known is false where the kernel does not say what is available.
func MachineMemory() (total, available int64, known bool) { return machineMemory("/") }

// machineMemory finds the kernel's file systems below top.
func machineMemory(top string) (total, available int64, known bool) {
	var info unix.Sysinfo_t
	_ = unix.Sysinfo(&info) // cannot fail: the pointer is good
	total = int64(uint64(info.Totalram) * uint64(info.Unit))
	available, known = field(top, "proc/meminfo", "MemAvailable:")
	available <<= 10
	group := ""
	for line := range strings.Lines(text(top, "proc/self/cgroup")) {
		if path, found := strings.CutPrefix(strings.TrimSpace(line), "0::"); found {
			group = path
		}
	}
	for ; ; group = filepath.Dir(group) { // a limit may be set above
		dir := filepath.Join("sys/fs/cgroup", group)
		if limit, err := number(top, dir+"/memory.max"); err == nil {
			total = min(total, limit)
			if used, err := number(top, dir+"/memory.current"); err == nil {
				cached, _ := field(top, dir+"/memory.stat", "inactive_file ") // the kernel can take it back at once
				available = min(available, limit-used+cached)
			}
		}
		if group == "" || group == "/" || group == "." {
			return total, available, known
		}
	}
}

// field is the number in the line of a file that begins with a name.
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
	b, _ := os.ReadFile(filepath.Join(top, file)) // missing: the machine has no such limit
	return string(b)
}
