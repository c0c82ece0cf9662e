package policyset

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// memoryFor is the memory of all policies' instances: what is configured, or a quarter of what the host may use.
func memoryFor(configured int64) uint64 {
	if configured > 0 {
		return uint64(configured)
	}
	return AvailableMemory() / 4
}

// AvailableMemory is the memory that the host may use.
func AvailableMemory() uint64 { return availableMemory("/") }

// availableMemory is the machine's memory or the limit of the process's control group, whichever is less. top is where
// the file systems of the kernel are mounted.
func availableMemory(top string) uint64 {
	var info unix.Sysinfo_t
	_ = unix.Sysinfo(&info) // cannot fail: the pointer is good
	memory := uint64(info.Totalram) * uint64(info.Unit)
	own, _ := os.ReadFile(filepath.Join(top, "proc/self/cgroup"))
	for line := range bytes.Lines(own) {
		group, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("0::"))
		for ok {
			text, _ := os.ReadFile(filepath.Join(top, "sys/fs/cgroup", string(group), "memory.max"))
			if limit, err := strconv.ParseUint(string(bytes.TrimSpace(text)), 10, 64); err == nil {
				memory = min(memory, limit)
			}
			if ok = len(group) > 1; ok {
				group = []byte(filepath.Dir(string(group)))
			}
		}
	}
	return memory
}
