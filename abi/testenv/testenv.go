//go:build linux

package testenv

import (
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
	parent := ""
	var st syscall.Statfs_t
	if err := syscall.Statfs("/dev/shm", &st); err == nil && st.Bavail*uint64(st.Bsize) > 4<<30 {
		parent = "/dev/shm"
	}
	dir, err := os.MkdirTemp(parent, "kv")
	OK(t, err)
	t.Cleanup(func() { NoError(t, os.RemoveAll(dir)) })
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
