package host_test

import (
	"io/fs"
	"os"
	"os/exec"
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
	metricInSource = regexp.MustCompile(`(?:\bdesc\(|^\t\{|= )"((?:root|level|policy|policies|shadow|transfer|codec|route|direct|handle|gpu|staging|memory|client|model|otlp)_[a-z_]+|sessions|leases)"`)
	counterInTable = regexp.MustCompile(`^\t\{"((?:lookups?|stores?|stored|load|loaded)(?:_[a-z_]+)?)", `)
	metricInText   = regexp.MustCompile("`kvhost_([a-z_]+)`")
)

// exportedMetrics are the names of all metrics in the source, without the prefix.
func exportedMetrics(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("internal/observe/*.go")
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
	exported["build_info"] = true // with its own constructor
	if len(exported) < 80 {
		t.Fatalf("only %d metrics were found in internal/observe/*.go", len(exported))
	}
	return exported
}

// OPERATIONS.md lists every metric, and no other.
func TestOperationsListMetrics(t *testing.T) {
	exported := exportedMetrics(t)
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

var (
	metricInQuery = regexp.MustCompile(`(^|[^:a-z_])kvhost_([a-z_]+)`)
	histogramPart = regexp.MustCompile(`_seconds_(bucket|sum|count)$`)
)

// The dashboard and the alerts ask for metrics that a host has.
func TestMonitoringNamesMetrics(t *testing.T) {
	exported := exportedMetrics(t)
	for _, file := range []string{"dashboard.json", "alerts.yml", "alerts_test.yml"} {
		names := metricInQuery.FindAllStringSubmatch(readText(t, "../examples/monitoring/"+file), -1)
		if len(names) < 20 {
			t.Errorf("%s names only %d metrics", file, len(names))
		}
		for _, m := range names {
			if !exported[m[2]] && !exported[histogramPart.ReplaceAllString(m[2], "_seconds")] {
				t.Errorf("%s names kvhost_%s, which no host exports", file, m[2])
			}
		}
	}
}

var (
	testInText   = regexp.MustCompile("`(Test[A-Za-z]+)`")
	testInSource = regexp.MustCompile(`(?m)^func (Test[A-Za-z]+)\(t `)
)

// Every test that the README names exists.
func TestReadmeNamesTests(t *testing.T) {
	exists := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != ".." && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, "_test.go") {
			for _, m := range testInSource.FindAllStringSubmatch(readText(t, path), -1) {
				exists[m[1]] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	named := testInText.FindAllStringSubmatch(readText(t, "../README.md"), -1)
	if len(named) == 0 {
		t.Error("the README names no tests")
	}
	for _, m := range named {
		if !exists[m[1]] {
			t.Errorf("the README names %s, which does not exist", m[1])
		}
	}
}

// The policy in the README is the code of fifo, without its comments.
func TestReadmePolicy(t *testing.T) {
	_, rest, _ := strings.Cut(readText(t, "../README.md"), "```go\n")
	shown, _, _ := strings.Cut(rest, "```")
	var code strings.Builder
	blank := true
	for line := range strings.Lines(readText(t, "../plugins/fifo/fifo.go")) {
		if strings.HasPrefix(line, "//") || blank && line == "\n" {
			continue
		}
		blank = line == "\n"
		code.WriteString(line)
	}
	if shown != code.String() {
		t.Errorf("the README shows\n%s\nfifo is\n%s", shown, code.String())
	}
}

var (
	codeInText  = regexp.MustCompile("`([^`]+)`")
	packageRows = regexp.MustCompile(`(?s)## Packages\n(.*?)\n## `)
)

// Every path in ARCHITECTURE.md exists.
func TestArchitecturePaths(t *testing.T) {
	n := 0
	for _, m := range codeInText.FindAllStringSubmatch(readText(t, "ARCHITECTURE.md"), -1) {
		path := m[1]
		if !regexp.MustCompile(`^[a-zA-Z0-9_./]+\.(go|md|proto)$`).MatchString(path) {
			continue
		}
		n++
		if _, err := os.Stat(path); err == nil {
			continue
		}
		if _, err := os.Stat(filepath.Join("..", path)); err != nil {
			t.Errorf("ARCHITECTURE.md names %s, which does not exist", path)
		}
	}
	if n < 50 {
		t.Errorf("only %d paths were found", n)
	}
}

// Every package is in the table of packages, and every package there exists.
func TestArchitecturePackages(t *testing.T) {
	table := packageRows.FindStringSubmatch(readText(t, "ARCHITECTURE.md"))
	if table == nil {
		t.Fatal("there is no table of packages")
	}
	var listed []string
	for line := range strings.Lines(table[1]) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			continue
		}
		for _, m := range codeInText.FindAllStringSubmatch(cells[1], -1) {
			listed = append(listed, m[1])
		}
	}
	out, err := exec.Command("go", "list", module+"/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	used := map[string]bool{}
	for path := range strings.FieldsSeq(string(out)) {
		rel := strings.TrimPrefix(path, module+"/")
		found := false
		for _, l := range listed {
			prefix, tree := strings.CutSuffix(l, "/...")
			for _, full := range []string{prefix, "host/" + prefix} {
				if rel == full || tree && strings.HasPrefix(rel, full+"/") || strings.HasPrefix(rel, "examples/") {
					found, used[l] = true, true
				}
			}
		}
		if !found {
			t.Errorf("ARCHITECTURE.md does not list the package %s", rel)
		}
	}
	for _, l := range listed {
		if _, err := os.Stat(l); err != nil && !used[l] {
			t.Errorf("ARCHITECTURE.md lists %s, which is no package", l)
		}
	}
}

var linkInText = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)

// Links between the documents lead to files.
func TestLinks(t *testing.T) {
	texts := []string{"../README.md", "ARCHITECTURE.md", "OPERATIONS.md", "RATIONALE.md", "internal/store/FORMAT.md",
		"../.github/CONTRIBUTING.md", "../.github/CHANGELOG.md"}
	for _, text := range texts {
		for _, m := range linkInText.FindAllStringSubmatch(readText(t, text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(text), m[1])); err != nil {
				t.Errorf("%s: %v", text, err)
			}
		}
	}
}

// The messages in the troubleshooting table are in the code.
func TestTroubleshootingMessages(t *testing.T) {
	_, table, found := strings.Cut(readText(t, "OPERATIONS.md"), "## Troubleshooting")
	if !found {
		t.Fatal("there is no troubleshooting table")
	}
	var code strings.Builder
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			code.WriteString(readText(t, path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			continue
		}
		for _, m := range codeInText.FindAllStringSubmatch(cells[1], -1) {
			if !strings.Contains(m[1], " ") {
				continue
			}
			n++
			if !strings.Contains(code.String(), m[1]) {
				t.Errorf("OPERATIONS.md names the message %q, which the code does not have", m[1])
			}
		}
	}
	if n < 6 {
		t.Errorf("only %d messages were found", n)
	}
}
