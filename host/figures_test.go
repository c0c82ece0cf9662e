package host_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

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
