// Package policytest builds first-party policies to wasm for tests, from a clean checkout and without a network.
package policytest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

var (
	mu    sync.Mutex
	built = map[string]bool{}
)

// Dir builds the named policies (all directories under plugins/ when none is named) and returns the directory with
// their .wasm files, for policy.Options.Dir. It is plugins/dist, so that what one run built the next one finds.
func Dir(t testing.TB, names ...string) string {
	t.Helper()
	dir, err := Build(names...)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Build is Dir for a TestMain.
func Build(names ...string) (string, error) {
	mu.Lock()
	defer mu.Unlock()
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("policytest: go env GOMOD: %w", err)
	}
	plugins := filepath.Join(filepath.Dir(strings.TrimSpace(string(mod))), "plugins")
	dist := filepath.Join(plugins, "dist")
	key := strings.Join(names, " ")
	if built[key] {
		return dist, nil
	}
	args := []string{"run", "github.com/kvhost/kvhost/plugins/dist/build", "-o", dist}
	for _, n := range names {
		args = append(args, filepath.Join(plugins, n))
	}
	cmd := exec.Command("go", args...)
	cmd.Dir = plugins
	cmd.Env = append(os.Environ(), "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("policytest: building policies: %w\n%s", err, out)
	}
	built[key] = true
	return dist, nil
}
