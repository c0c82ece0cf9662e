package host_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var (
	metricInSource = regexp.MustCompile(`(?:\bdesc\(|^\t\{|= )"((?:root|policy|shadow|transfer|route|direct|handle|gpu|staging)_[a-z_]+|sessions|leases)"`)
	counterInTable = regexp.MustCompile(`^\t\{"([a-z_]+)", .*transfer\.Stats\)`)
	metricInText   = regexp.MustCompile("`kvhost_([a-z_]+)`")
)

// OPERATIONS.md lists every metric, and no other.
func TestOperationsListMetrics(t *testing.T) {
	files, err := filepath.Glob("metrics/*.go")
	if err != nil {
		t.Fatal(err)
	}
	exported := map[string]bool{}
	for _, file := range files {
		for line := range strings.Lines(readText(t, file)) {
			if m := counterInTable.FindStringSubmatch(line); m != nil {
				exported[m[1]+"_total"] = true
			} else if m := metricInSource.FindStringSubmatch(line); m != nil {
				exported[m[1]] = true
			}
		}
	}
	if len(exported) < 80 {
		t.Fatalf("only %d metrics were found in metrics/*.go", len(exported))
	}
	listed := map[string]bool{}
	for _, m := range metricInText.FindAllStringSubmatch(readText(t, "OPERATIONS.md"), -1) {
		listed[m[1]] = true
		if !exported[m[1]] {
			t.Errorf("OPERATIONS.md names kvhost_%s, which no host exports", m[1])
		}
	}
	for name := range exported {
		if !listed[name] {
			t.Errorf("OPERATIONS.md does not name kvhost_%s", name)
		}
	}
}
