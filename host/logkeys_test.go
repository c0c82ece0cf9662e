package host_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// firstKey is the position of the first key among the arguments of slog's functions and a Logger's methods.
var firstKey = map[string]int{
	"Debug": 1, "Info": 1, "Warn": 1, "Error": 1, "DebugContext": 2, "InfoContext": 2, "WarnContext": 2, "ErrorContext": 2,
	"Log": 3, "With": 0, "Group": 1,
}

// ownKeys are those that every record has.
var ownKeys = []string{slog.LevelKey, slog.MessageKey, slog.TimeKey, slog.SourceKey}

// Readers of a record with two values of a key take either, or fail. TestLogKeys finds calls with a key of slog's own, and those
// that repeat a key of theirs or of a logger of the same function. The hosts of hosttest find other loggers' when they log.
func TestLogKeys(t *testing.T) {
	testenv.Slow(t)
	testenv.Need(t, testenv.Git)
	if !exists("../.git") {
		t.Skip("not a checkout: git lists the files that this test reads")
	}
	list, err := exec.Command("git", "-C", "..", "ls-files", "*.go").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	calls := 0
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, "../"+name, nil, parser.SkipObjectResolution)
		if err != nil || strings.HasSuffix(name, "_test.go") {
			continue // git may not know yet that it was deleted
		}
		loggers := map[string][]string{} // of a function: the keys of its variables
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				loggers = map[string][]string{}
			case *ast.AssignStmt:
				if v, ok := n.Lhs[0].(*ast.Ident); ok && len(n.Rhs) == 1 {
					if method, keys, _ := logKeys(n.Rhs[0]); method == "With" {
						loggers[v.Name] = keys
					}
				}
			}
			_, keys, logger := logKeys(n)
			for i, key := range keys {
				at := files.Position(n.Pos())
				if slices.Contains(ownKeys, key) {
					t.Errorf("%s:%d: the key %q is slog's own: a record has it twice", name, at.Line, key)
				}
				if slices.Contains(keys[:i], key) || slices.Contains(loggers[logger], key) {
					t.Errorf("%s:%d: the record has the key %q twice", name, at.Line, key)
				}
			}
			calls += min(1, len(keys))
			return true
		})
	}
	if calls < 100 {
		t.Errorf("only %d calls log with keys: the test does not see them", calls)
	}
}

// logKeys are the keys of a call that logs, or makes a logger, and the variable whose method it is, if any.
func logKeys(n ast.Node) (method string, keys []string, logger string) {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return "", nil, ""
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", nil, ""
	}
	if v, ok := f.X.(*ast.Ident); ok {
		logger = v.Name
	}
	first, ok := firstKey[f.Sel.Name]
	for at := first; ok && at < len(call.Args); {
		var key string
		if attr, isCall := call.Args[at].(*ast.CallExpr); isCall && len(attr.Args) > 0 { // slog.Int("bytes", n)
			key, ok = literal(attr.Args[0])
			at++
		} else {
			key, ok = literal(call.Args[at]) // or a list of attributes, whose keys are looked at where it is made
			at += 2
		}
		if ok {
			keys = append(keys, key)
		}
	}
	return f.Sel.Name, keys, logger
}

func literal(e ast.Expr) (string, bool) {
	of, ok := e.(*ast.BasicLit)
	if !ok || of.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(of.Value)
	return s, err == nil
}
