//go:build linux

package testenv

import (
	"os"
	"path/filepath"
	"testing"
)

// Require is the environment variable that makes a missing tool a failure.
const Require = "KVHOST_REQUIRE_TOOLS"

// Required says whether a missing tool is a failure.
func Required() bool { return os.Getenv(Require) == "1" }

// Need skips the test when the machine lacks one of the tools, or fails it when tools are required.
func Need(t testing.TB, tools ...*Tool) {
	t.Helper()
	for _, tool := range tools {
		if tool.Have() {
			continue
		}
		first := tool.First()
		if Required() && !tool.Optional {
			t.Fatalf("missing: %s: %s (%s=1)", first.Name, first.Fix(), Require)
		}
		t.Skipf("missing: %s: %s", first.Name, first.Fix())
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
