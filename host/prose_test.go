package host_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// mannered are words that make a sentence of this code harder to read where they are frequent: its subject is a noun of the
// system, and what happens at the same time, or to another, is said plainly.
var mannered = regexp.MustCompile(`(?i)\b(nobody|somebody|meanwhile|beside|told of|hears? of|whose|stands? in|gives? up)\b`)

// manneredMost is how many of them 100,000 words of comments and documents may have: room for words that are right where they stand.
const manneredMost = 20

// comments returns the text of a Go file's comments.
func comments(src []byte) string {
	var text strings.Builder
	var s scanner.Scanner
	files := token.NewFileSet()
	s.Init(files.AddFile("", files.Base(), len(src)), src, nil, scanner.ScanComments)
	for {
		_, kind, literal := s.Scan()
		switch kind {
		case token.EOF:
			return text.String()
		case token.COMMENT:
			text.WriteString(strings.ReplaceAll(literal, "//", " ") + "\n")
		}
	}
}

// TestProse counts them in the comments of Go that is no test, and in all documents. KVHOST_PROSE=1 lists every one.
func TestProse(t *testing.T) {
	testenv.Slow(t)
	testenv.Need(t, testenv.Git)
	if !exists("../.git") {
		t.Skip("not a checkout: git lists the files that this test reads")
	}
	list, err := exec.Command("git", "-C", "..", "ls-files", "*.go", "*.md").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	words, found := map[string]int{}, map[string]int{}
	allWords, all := 0, 0
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		text, err := os.ReadFile("../" + name)
		if err != nil || strings.HasSuffix(name, "_test.go") || strings.HasSuffix(name, ".pb.go") {
			continue
		}
		prose := string(text)
		if filepath.Ext(name) == ".go" {
			prose = comments(text)
		}
		dir := filepath.Dir(name)
		hits := mannered.FindAllString(prose, -1)
		words[dir] += len(strings.Fields(prose))
		found[dir] += len(hits)
		allWords += len(strings.Fields(prose))
		all += len(hits)
		if len(hits) > 0 && os.Getenv("KVHOST_PROSE") != "" {
			for line := range strings.Lines(prose) {
				if mannered.MatchString(line) {
					fmt.Printf("%s: %s\n", name, strings.TrimSpace(line))
				}
			}
		}
	}
	per := func(found, words int) int { return found * 100_000 / max(words, 1) }
	t.Logf("%d in %d words: %d per 100,000", all, allWords, per(all, allWords))
	if per(all, allWords) <= manneredMost {
		return
	}
	t.Errorf("%d words in 100,000 match %v, want at most %d:", per(all, allWords), mannered, manneredMost)
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		if found[dir] > 0 {
			t.Errorf("  %s: %d in %d words", dir, found[dir], words[dir])
		}
	}
}

// bareMost is how many of 100 messages of Errorf and Fatalf may have no word that says what was looked at, as "%v %v" has
// none, or "got %v, want %v".
const bareMost = 2.0

// verbs are those of a format, with escaped characters.
var verbs = regexp.MustCompile(`%[-+# 0]*[\d*.\[\]]*[a-zA-Z%]`)

// TestMessages counts them in all tests. KVHOST_MESSAGES=1 lists every one.
func TestMessages(t *testing.T) {
	testenv.Slow(t)
	testenv.Need(t, testenv.Git)
	if !exists("../.git") {
		t.Skip("not a checkout: git lists the files that this test reads")
	}
	list, err := exec.Command("git", "-C", "..", "ls-files", "*_test.go").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	all, bare := 0, 0
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, "../"+name, nil, parser.SkipObjectResolution)
		if err != nil {
			continue // it was deleted, and git does not know yet
		}
		ast.Inspect(f, func(n ast.Node) bool {
			format, ok := formatOf(n)
			if !ok {
				return true
			}
			all++
			if says(format) {
				return true
			}
			bare++
			if os.Getenv("KVHOST_MESSAGES") != "" {
				t.Logf("%s:%d: %q", name, files.Position(n.Pos()).Line, format)
			}
			return true
		})
	}
	if part := 100 * float64(bare) / float64(max(all, 1)); part > bareMost {
		t.Errorf("%d of %d failure messages (%.1f %%) do not say what was looked at, at most %.1f %% may: KVHOST_MESSAGES=1 lists them",
			bare, all, part, bareMost)
	}
}

// formatOf is the format of a call of Errorf or Fatalf.
func formatOf(n ast.Node) (string, bool) {
	call, ok := n.(*ast.CallExpr)
	if !ok || len(call.Args) == 0 {
		return "", false
	}
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || method.Sel.Name != "Errorf" && method.Sel.Name != "Fatalf" {
		return "", false
	}
	text, ok := call.Args[0].(*ast.BasicLit)
	if !ok {
		return "", false
	}
	format, err := strconv.Unquote(text.Value)
	return format, err == nil
}

// says reports whether a format has a word besides the usual ones between its verbs.
func says(format string) bool {
	for word := range strings.FieldsFuncSeq(verbs.ReplaceAllString(format, " "), func(r rune) bool { return r < 'A' || r > 'z' || r > 'Z' && r < 'a' }) {
		switch word {
		case "got", "want", "and", "in":
		default:
			return true
		}
	}
	return false
}
