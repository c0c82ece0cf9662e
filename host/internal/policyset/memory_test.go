package policyset

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestMemoryFor(t *testing.T) {
	if got := memoryFor(5 << 20); got != 5<<20 {
		t.Errorf("configured: %d", got)
	}
	all := availableMemory(t.TempDir())
	if all < 64<<20 {
		t.Errorf("the machine has %d bytes", all)
	}
	top := t.TempDir()
	group := filepath.Join(top, "sys/fs/cgroup/a/b")
	err := errors.Join(os.MkdirAll(group, 0o700), os.MkdirAll(filepath.Join(top, "proc/self"), 0o700))
	write := func(name, text string) {
		err = errors.Join(err, os.WriteFile(filepath.Join(top, name), []byte(text), 0o600))
	}
	write("proc/self/cgroup", "0::/a/b\n")
	write("sys/fs/cgroup/a/b/memory.max", "max\n")
	write("sys/fs/cgroup/a/memory.max", "1048576\n")
	if err != nil {
		t.Fatal(err)
	}
	if got := availableMemory(top); got != 1<<20 {
		t.Errorf("in a control group of 1 MiB: %d", got)
	}
}
