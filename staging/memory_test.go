package staging

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// What is available is the least of the machine's and of what each control group leaves, and a group's cached files can go.
func TestMachineMemory(t *testing.T) {
	for _, v := range []struct {
		name, mount, line, limit, used, cached, none string
	}{
		{"version 1", "sys/fs/cgroup/memory", "7:pids:/x\n4:cpuset,memory:/a/b\n0::/y\n", "memory.limit_in_bytes", "memory.usage_in_bytes",
			"inactive_file 1\ntotal_inactive_file 131072\n", "9223372036854771712\n"},
		{"version 2", "sys/fs/cgroup", "0::/a/b\n", "memory.max", "memory.current", "anon 524288\ninactive_file 131072\n", "max\n"},
	} {
		t.Run(v.name, func(t *testing.T) {
			top := t.TempDir()
			all, _, known := machineMemory(top)
			if all < 64<<20 || known {
				t.Errorf("a machine that does not say what is available has %d bytes, known %v", all, known)
			}
			above, group := filepath.Join(v.mount, "a"), filepath.Join(v.mount, "a/b")
			err := errors.Join(os.MkdirAll(filepath.Join(top, group), 0o700), os.MkdirAll(filepath.Join(top, "proc/self"), 0o700))
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
			write("proc/self/cgroup", v.line)
			write(filepath.Join(group, v.limit), v.none)
			write(filepath.Join(above, v.limit), "1048576\n")
			want("a limit above, without its use", 1<<20, 2<<20)
			write(filepath.Join(above, v.used), "786432\n")
			want("a limit above", 1<<20, 1<<18)
			write(filepath.Join(above, "memory.stat"), v.cached)
			want("a limit above, with cached files", 1<<20, 1<<18+1<<17)
			write(filepath.Join(v.mount, v.limit), "524288\n")
			want("the limit of a container, whose group has the machine's path", 1<<19, 1<<18+1<<17)
		})
	}
}

// A process in a group of 1 GiB has no more, whichever version of control groups the machine has.
func TestMemoryOfAGroup(t *testing.T) {
	const inGroup, limit = "KVHOST_TEST_IN_GROUP", 1 << 30
	if os.Getenv(inGroup) != "" {
		if total, available, known := MachineMemory(); total != limit || available > limit || !known {
			t.Errorf("in a group of %d bytes: got %d bytes, %d available, known %v", limit, total, available, known)
		}
		return
	}
	testenv.Need(t, testenv.MemoryCgroup)
	dir, err := os.MkdirTemp(testenv.MemoryCgroups(), "kvhost-test-")
	testenv.OK(t, err)
	t.Cleanup(func() { testenv.NoError(t, os.Remove(dir)) })
	name := "memory.max"
	if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
		name = "memory.limit_in_bytes"
	}
	testenv.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(strconv.Itoa(limit)), 0))
	cmd := exec.Command("sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, dir, os.Args[0], "-test.run=^TestMemoryOfAGroup$")
	cmd.Env = append(os.Environ(), inGroup+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("a process in a group: %v\n%s", err, out)
	}
}
