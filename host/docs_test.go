package host_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/observe"
)

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	testenv.OK(t, err)
	return string(text)
}

var metricInText = regexp.MustCompile("`kvhost_([a-z_]+)`")

// exportedMetrics are the names of all metrics, without the prefix.
func exportedMetrics() map[string]bool {
	exported := map[string]bool{}
	for _, name := range observe.Names() {
		exported[name] = true
	}
	return exported
}

// The reference lists every metric, and no other.
func TestReferenceListsMetrics(t *testing.T) {
	exported := exportedMetrics()
	listed := map[string]bool{}
	for _, m := range metricInText.FindAllStringSubmatch(readText(t, "docs/reference.md"), -1) {
		listed[m[1]] = true
		if !exported[m[1]] {
			t.Errorf("docs/reference.md names kvhost_%s, which no host exports", m[1])
		}
	}
	for name := range exported {
		if !listed[name] {
			t.Errorf("docs/reference.md does not name kvhost_%s", name)
		}
	}
	for _, m := range metricInQuery.FindAllStringSubmatch(readText(t, "docs/operate.md"), -1) {
		if !exported[m[2]] && !exported[histogramPart.ReplaceAllString(m[2], "_seconds")] {
			t.Errorf("docs/operate.md names kvhost_%s, which no host exports", m[2])
		}
	}
}

var (
	metricInQuery = regexp.MustCompile(`(^|[^:a-z_])kvhost_([a-z_]+)`)
	histogramPart = regexp.MustCompile(`_seconds_(bucket|sum|count)$`)
)

// The dashboard and the alerts ask for metrics that a host has.
func TestMonitoringNamesMetrics(t *testing.T) {
	exported := exportedMetrics()
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
	codeInText   = regexp.MustCompile("`([^`\n]+)`")
	pathInText   = regexp.MustCompile(`^[a-zA-Z0-9_./]+\.(go|md|proto|json)$`)
	memberInText = regexp.MustCompile(`^([A-Z][A-Za-z]+|[a-z]+[A-Z][A-Za-z]*|marks|fence)\.([A-Za-z]+)$`)
	packageRows  = regexp.MustCompile(`(?s)## Packages\n(.*?)\n## `)
)

// inTree says where a path of design.md is.
func inTree(path string) (string, bool) {
	for _, dir := range []string{"internal/", "../"} {
		if _, err := os.Stat(dir + path); err == nil {
			return dir + path, true
		}
	}
	return "", false
}

// Every path and every member of a type in design.md exists.
func TestDesignNames(t *testing.T) {
	testenv.Slow(t)
	var code strings.Builder
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			code.WriteString(readText(t, path))
		}
		return err
	})
	testenv.OK(t, err)
	paths, members := 0, 0
	for _, m := range codeInText.FindAllStringSubmatch(readText(t, "docs/design.md"), -1) {
		if pathInText.MatchString(m[1]) {
			paths++
			if _, found := inTree(m[1]); !found {
				t.Errorf("design.md names %s, which does not exist", m[1])
			}
		}
		if of := memberInText.FindStringSubmatch(m[1]); of != nil {
			members++
			method := regexp.MustCompile(`func \(\w* ?\*?` + of[1] + `\) ` + of[2] + `\(`)
			fields := regexp.MustCompile(`(?s)\btype `+of[1]+` struct \{.*?\n\}`).FindAllString(code.String(), -1)
			if !method.MatchString(code.String()) && !regexp.MustCompile(`\b`+of[2]+`\b`).MatchString(strings.Join(fields, "")) {
				t.Errorf("design.md names %s: want a method or field of that type, got neither", m[1])
			}
		}
	}
	if paths < 15 || members < 20 {
		t.Errorf("only %d paths and %d members were found in design.md", paths, members)
	}
}

// Every package is in the table of packages, and every package there exists.
func TestDesignPackages(t *testing.T) {
	testenv.Slow(t)
	table := packageRows.FindStringSubmatch(readText(t, "docs/design.md"))
	if table == nil {
		t.Fatal("design.md has no table of packages")
	}
	var listed []string
	for line := range strings.Lines(table[1]) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			continue
		}
		for _, m := range codeInText.FindAllStringSubmatch(cells[1], -1) {
			listed = append(listed, m[1])
			if _, found := inTree(strings.TrimSuffix(m[1], "/...")); !found {
				t.Errorf("design.md lists %s, which is no package", m[1])
			}
		}
	}
	out, err := exec.Command("go", "list", module+"/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for path := range strings.FieldsSeq(string(out)) {
		rel := strings.TrimPrefix(path, module+"/")
		if !slices.ContainsFunc(listed, func(l string) bool {
			prefix, tree := strings.CutSuffix(l, "/...")
			return slices.ContainsFunc([]string{prefix, "host/internal/" + prefix}, func(full string) bool {
				return rel == full || tree && strings.HasPrefix(rel, full+"/")
			})
		}) {
			t.Errorf("design.md does not list the package %s", rel)
		}
	}
}

// documents are all Markdown files, by their paths from here.
func documents(t *testing.T) (paths []string) {
	t.Helper()
	testenv.Need(t, testenv.Git)
	list, err := exec.Command("git", "-C", "..", "ls-files", "--cached", "--others", "--exclude-standard", "*.md").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	for name := range strings.Lines(string(list)) {
		if path := "../" + strings.TrimSpace(name); exists(path) {
			paths = append(paths, path)
		}
	}
	if len(paths) < 15 {
		t.Fatalf("git knows only %d documents", len(paths))
	}
	return paths
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

var (
	linkInText = regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)]*))?\)`)
	heading    = regexp.MustCompile(`(?m)^#+ (.*)$`)
	nameInText = regexp.MustCompile(`<a name="([^"]+)">`)
	notInSlugs = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are the places in a document that a link can name.
func anchors(text string) map[string]bool {
	places := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		title := regexp.MustCompile(`\]\([^)]*\)`).ReplaceAllString(m[1], "")
		places[strings.ReplaceAll(notInSlugs.ReplaceAllString(strings.ToLower(title), ""), " ", "-")] = true
	}
	for _, m := range nameInText.FindAllStringSubmatch(text, -1) {
		places[m[1]] = true
	}
	return places
}

// Links between the documents lead to files and headings.
func TestLinks(t *testing.T) {
	for _, path := range documents(t) {
		for _, m := range linkInText.FindAllStringSubmatch(readText(t, path), -1) {
			if strings.Contains(m[0], "://") || m[1] == "" && m[2] == "" {
				continue
			}
			target := path
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(path), m[1])
			}
			if !exists(target) {
				t.Errorf("%s links to %s, which does not exist", path, m[1])
			} else if m[2] != "" && !anchors(readText(t, target))[m[2]] {
				t.Errorf("%s links to %s#%s, and there is no such heading", path, m[1], m[2])
			}
		}
	}
}

var commitInText = regexp.MustCompile(`\b[0-9a-f]{7}\b`)

// Every commit that a document cites exists.
func TestCommits(t *testing.T) {
	testenv.Slow(t)
	docs := documents(t)
	if out, err := exec.Command("git", "-C", "..", "rev-parse", "--is-shallow-repository").Output(); err != nil ||
		strings.TrimSpace(string(out)) != "false" {
		t.Skip("not a whole clone: git does not have the commits that the documents cite")
	}
	cited := 0
	for _, path := range append(docs, "docs/figures.json") {
		for _, hash := range commitInText.FindAllString(readText(t, path), -1) {
			if !strings.ContainsAny(hash, "abcdef") || !strings.ContainsAny(hash, "0123456789") {
				continue
			}
			cited++
			if err := exec.Command("git", "-C", "..", "cat-file", "-e", hash+"^{commit}").Run(); err != nil {
				t.Errorf("%s cites the commit %s, which does not exist", path, hash)
			}
		}
	}
	if cited < 10 {
		t.Errorf("only %d commits were found", cited)
	}
}

// The messages in the troubleshooting table are in the code.
func TestTroubleshootingMessages(t *testing.T) {
	testenv.Slow(t)
	_, table, found := strings.Cut(readText(t, "docs/operate.md"), "## Troubleshooting")
	if !found {
		t.Fatal("there is no troubleshooting table")
	}
	var code strings.Builder
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		ours := strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") ||
			strings.HasSuffix(path, ".py") && strings.Contains(path, "/python/kvhost/")
		if err == nil && ours {
			code.WriteString(readText(t, path))
		}
		return err
	})
	testenv.OK(t, err)
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
				t.Errorf("docs/operate.md names the message %q, which the code does not have", m[1])
			}
		}
	}
	if n < 6 {
		t.Errorf("only %d messages were found", n)
	}
}

var (
	namedTest = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9]*)`")
	testFunc  = regexp.MustCompile(`(?m)^func (Test[A-Z][A-Za-z0-9]*)\(`)
)

// The tests that promises and claims name exist, and each row of the table of what tenants can do to each other has one.
func TestClaimsHaveTests(t *testing.T) {
	testenv.Slow(t)
	testenv.Need(t, testenv.Git)
	list, err := exec.Command("git", "-C", "..", "ls-files", "*_test.go").Output()
	testenv.OK(t, err)
	have := map[string]bool{}
	for name := range strings.Lines(string(list)) {
		for _, m := range testFunc.FindAllStringSubmatch(readText(t, "../"+strings.TrimSpace(name)), -1) {
			have[m[1]] = true
		}
	}
	for _, file := range []string{"../README.md", "../.github/SECURITY.md", "docs/design.md", "docs/operate.md", "docs/formats.md", "../.github/CONTRIBUTING.md"} {
		for _, m := range namedTest.FindAllStringSubmatch(readText(t, file), -1) {
			if !have[m[1]] {
				t.Errorf("%s names %s, which is no test", file, m[1])
			}
		}
	}
	table := false // one whose last column has tests
	for line := range strings.Lines(readText(t, "../.github/SECURITY.md")) {
		switch line = strings.TrimSpace(line); {
		case !strings.HasPrefix(line, "|"):
			table = false
		case strings.HasSuffix(line, "| test |"):
			table = true
		case table && !strings.HasPrefix(line, "|---") && !strings.HasPrefix(line, "| operator:") && !namedTest.MatchString(line):
			t.Errorf("a row names no test: %s", line)
		}
	}
}

var (
	testCommand   = regexp.MustCompile("(?:\\bgo|\\$\\(GO\\)) test [^`\n]*")
	namedPackage  = regexp.MustCompile(` (\./\S*)`)
	namedInOption = regexp.MustCompile(` -run '?\^?(Test[A-Za-z0-9]+)`)
)

// A command of the Makefile or a document that runs one test names a package that has it: go test takes none for success.
func TestCommandsNameTheirTests(t *testing.T) {
	testenv.Slow(t)
	commands := 0
	for _, path := range append(documents(t), "../Makefile") {
		for _, command := range testCommand.FindAllString(readText(t, path), -1) {
			in, test := namedPackage.FindStringSubmatch(command), namedInOption.FindStringSubmatch(command)
			if in == nil || test == nil {
				continue
			}
			commands++
			files, err := filepath.Glob("../" + in[1] + "/*_test.go")
			testenv.OK(t, err)
			if !slices.ContainsFunc(files, func(file string) bool {
				return strings.Contains(readText(t, file), "\nfunc "+test[1])
			}) {
				t.Errorf("%s: no test %s is in %s: %s", path, test[1], in[1], command)
			}
		}
	}
	if commands < 8 {
		t.Errorf("only %d commands were found", commands)
	}
}

var updateFigures = flag.Bool("update-figures", false, "write docs/figures.md and the README's numbers from docs/figures.json")

// figures is docs/figures.json. A row begins with as many labels as its table says.
type figures struct {
	Tables []figureTable
	Readme map[string][]string // lines; {table:label/label:column} is a cell
}

type figureTable struct {
	ID, Title, Date, Commit, Machine, How, Note string
	Labels                                      int
	Columns                                     []string
	Rows                                        [][]string
}

const figuresHead = `# Figures

Written by ` + "`make figures` from [`figures.json`](figures.json)" + `, where each figure is once. A table names its day, its commit and its
machine; a commit in brackets is the one that brought the figures. Ratios are of runs in turns on one machine, and figures of
different tables are not of one machine. [lab](lab) has what was tried.
`

func (t *figureTable) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n## %s\n\n%s, %s; %s. %s\n\n", t.Title, t.Date, t.Commit, t.Machine, t.How)
	fmt.Fprintf(b, "| %s |\n|%s\n", strings.Join(t.Columns, " | "), strings.Repeat("---|", len(t.Columns)))
	for _, row := range t.Rows {
		fmt.Fprintf(b, "| %s |\n", strings.Join(row, " | "))
	}
	if t.Note != "" {
		fmt.Fprintf(b, "\n%s\n", t.Note)
	}
}

// cell returns a figure without its brackets.
func (f *figures) cell(table, labels, column string) (string, error) {
	for _, t := range f.Tables {
		for _, row := range t.Rows {
			if t.ID != table || strings.Join(row[:t.Labels], "/") != labels {
				continue
			}
			for i, name := range t.Columns {
				if name == column {
					figure, _, _ := strings.Cut(row[i], " (")
					return figure, nil
				}
			}
		}
	}
	return "", fmt.Errorf("figures.json has no cell %s:%s:%s", table, labels, column)
}

var cellInText = regexp.MustCompile(`\{([^:{}]+):([^:{}]+):([^:{}]+)\}`)

// fill replaces the part of a text between the marks of each block of the README.
func (f *figures) fill(text string) (string, error) {
	var missing error
	for name, lines := range f.Readme {
		begin, end := "<!-- figures: "+name+" -->\n", "<!-- end of figures -->"
		head, rest, found := strings.Cut(text, begin)
		_, tail, closed := strings.Cut(rest, end)
		if !found || !closed {
			return "", fmt.Errorf("the README has nothing between %q and %q", begin, end)
		}
		block := cellInText.ReplaceAllStringFunc(strings.Join(lines, "\n"), func(ref string) string {
			m := cellInText.FindStringSubmatch(ref)
			figure, err := f.cell(m[1], m[2], m[3])
			if err != nil {
				missing = err
			}
			return figure
		})
		text = head + begin + block + "\n" + end + tail
	}
	return text, missing
}

// The page of figures and the README's numbers are those of figures.json.
func TestFigures(t *testing.T) {
	var f figures
	if err := json.Unmarshal([]byte(readText(t, "docs/figures.json")), &f); err != nil {
		t.Fatalf("figures.json: %v", err)
	}
	page := strings.Builder{}
	page.WriteString(figuresHead)
	for i := range f.Tables {
		table := &f.Tables[i]
		for _, row := range table.Rows {
			if len(row) != len(table.Columns) {
				t.Fatalf("%s: a row has %d cells, want %d as the head: %q", table.ID, len(row), len(table.Columns), row)
			}
		}
		table.write(&page)
	}
	readme, err := f.fill(readText(t, "../README.md"))
	testenv.OK(t, err)
	for path, want := range map[string]string{"docs/figures.md": page.String(), "../README.md": readme} {
		if *updateFigures {
			testenv.OK(t, os.WriteFile(path, []byte(want), 0o644))
		} else if got := readText(t, path); got != want {
			t.Errorf("%s has other figures than docs/figures.json: make figures", path)
		}
	}
}
