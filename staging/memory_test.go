package staging

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// What is available is the least of the machine's and of what each control group leaves, and a group's cached files can go.
func TestMachineMemory(t *testing.T) {
	top := t.TempDir()
	all, _, known := machineMemory(top)
	if all < 64<<20 || known {
		t.Errorf("a machine that does not say what is available has %d bytes, known %v", all, known)
	}
	group := filepath.Join(top, "sys/fs/cgroup/a/b")
	err := errors.Join(os.MkdirAll(group, 0o700), os.MkdirAll(filepath.Join(top, "proc/self"), 0o700))
	write := func(name, text string) {
		err = errors.Join(err, os.WriteFile(filepath.Join(top, name), []byte(text), 0o600))
		testenv.OK(t, err)
	}
	want := func(what string, total, available int64) {
		t.Helper()
		if gotTotal, got, known := machineMemory(top); gotTotal != total || got != available || !known {
			t.Errorf("%s: got %d bytes, %d available, known %v; want %d and %d", what, gotTotal, got, known, total, available)
		}
	}
	write("proc/meminfo", "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n")
	want("no control group", all, 2<<20)
	write("proc/self/cgroup", "0::/a/b\n")
	write("sys/fs/cgroup/a/b/memory.max", "max\n")
	write("sys/fs/cgroup/a/memory.max", "1048576\n")
	want("a limit above, without its use", 1<<20, 2<<20)
	write("sys/fs/cgroup/a/memory.current", "786432\n")
	want("a limit above", 1<<20, 1<<18)
	write("sys/fs/cgroup/a/memory.stat", "anon 524288\ninactive_file 131072\n")
	want("a limit above, with cached files", 1<<20, 1<<18+1<<17)
}
