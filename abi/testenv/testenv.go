//go:build linux

package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Require is the environment variable that makes a missing tool a failure.
const Require = "KVHOST_REQUIRE_TOOLS"

// Required says whether a missing tool is a failure.
func Required() bool { return os.Getenv(Require) == "1" }

// Dir makes a directory with a path that is short enough for a socket's, and removes it with the test. It is in memory where
// there is room: a test of processes that are killed, or of injected errors, is as good there, and takes a third of the time.
func Dir(t testing.TB) string {
	t.Helper()
	var st syscall.Statfs_t
	dir, err := "", syscall.Statfs("/dev/shm", &st)
	if err == nil && st.Bavail*uint64(st.Bsize) > 4<<30 {
		dir, _ = os.MkdirTemp("/dev/shm", "kv") // it may be read-only
	}
	if dir == "" {
		dir, err = os.MkdirTemp(ShortTemp(), "kv")
		OK(t, err)
	}
	t.Cleanup(func() { NoError(t, os.RemoveAll(dir)) })
	return dir
}

// longestTemp leaves what the names below it take of the 107 bytes of a socket's path.
const longestTemp = 40

// ShortTemp is the directory of temporary files, or /tmp where that is too long for sockets below it.
func ShortTemp() string {
	if dir := os.TempDir(); len(dir) <= longestTemp {
		return dir
	}
	return "/tmp"
}

// SmallDisk mounts a file system of so many bytes, of which nothing else takes any, until the test ends.
func SmallDisk(t testing.TB, bytes int) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("kvhost-test", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Skipf("missing: the right to mount (%v): run as root with CAP_SYS_ADMIN", err)
	}
	t.Cleanup(func() { NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

// Need skips the test when the machine lacks one of the tools, or fails it when tools are required. Those that are built it builds,
// unless one is missing that is not.
func Need(t testing.TB, tools ...*Tool) {
	t.Helper()
	for _, built := range []bool{false, true} {
		for _, tool := range tools {
			if (tool.build != nil) != built || tool.Obtain() {
				continue
			}
			first := tool.First()
			if Required() && !tool.Optional {
				t.Fatalf("missing: %s: %s (%s=1)%s", first.Name, first.Fix(), Require, first.failed)
			}
			t.Skipf("missing: %s: %s%s", first.Name, first.Fix(), first.failed)
		}
	}
}

// Rust's own installer keeps its tools where no PATH looks.
func init() {
	home, err := os.UserHomeDir()
	if err != nil {
		return
	}
	bin := filepath.Join(home, ".cargo", "bin")
	if _, err := os.Stat(filepath.Join(bin, "cargo")); err == nil {
		os.Setenv("PATH", os.Getenv("PATH")+string(os.PathListSeparator)+bin)
	}
}
