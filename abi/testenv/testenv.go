// Package testenv knows the tools that tests need besides Go: how to find each, what is tested with it, and how to get
// it.
//
// A test calls [Need] before it uses a tool. Without the tool the test is skipped, and says so. With [Require] set to
// 1, as continuous integration does, it fails. `go run ./abi/testenv/internal/tools` lists what this machine lacks.
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

// OK ends the test at an error: of what a test needs, and does not look at.
func OK(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// NoError fails the test at an error of what it looks at, and goes on.
func NoError(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}
