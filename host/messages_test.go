package host_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// bareMost is how many of 100 messages of Errorf and Fatalf may have no word that says what was looked at, as "%v %v" has
// none, or "got %v, want %v".
const bareMost = 2.0

// verbs are those of a format, with escaped characters.
var verbs = regexp.MustCompile(`%[-+# 0]*[\d*.\[\]]*[a-zA-Z%]`)

// TestMessages counts them in all tests. KVHOST_MESSAGES=1 lists every one.
func TestMessages(t *testing.T) {
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
