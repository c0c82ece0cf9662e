package host_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

const module = "github.com/kvhost/kvhost"

// rows is the layout: a package imports only packages of rows above its row, or of its own subtree. A package belongs
// to the longest prefix that matches.
var rows = [][]string{
	{"abi"},
	{"abi/guest"},
	{"plugins"},
	{"gds", "staging"},
	{"host/internal/regular", "host/kv"},
	{"host/internal/codec", "host/internal/memfs", "host/internal/payload", "host/internal/plain",
		"host/internal/s3fs", "host/internal/spans", "host/internal/testkit", "host/internal/trace"},
	{"host/internal/policy/meter"},
	{"host/internal/policy/sandbox"},
	{"host/internal/policy", "host/internal/testkit/policytest"},
	{"host/internal/policy/plugintest", "host/internal/policy/shadow"},
	{"host/internal/store/capacity", "host/internal/store/health", "host/internal/store/pieceformat"},
	{"host/internal/store/index", "host/internal/store/shared"},
	{"host/internal/store/catalog"},
	{"host/internal/store/evictor"},
	{"host/internal/store/entries", "host/internal/store/files"},
	{"host/internal/store/moves"},
	{"host/internal/store", "host/internal/store/fsck", "host/internal/testkit/storetest"},
	{"host/internal/transfer"},
	{"host/internal/proto"},
	{"host/internal/budget", "host/internal/testkit/peerdouble"},
	{"host/internal/peers"},
	{"host/internal/server", "host/client"},
	{"host/internal/drive", "host/internal/testkit/sizestest"},
	{"host/internal/config", "host/internal/replay"},
	{"host/internal/doctor"},
	{"host/internal/devices", "host/internal/observe", "host/internal/policyset", "host/internal/sim"},
	{"host"},
	{"host/internal/bench", "host/internal/testkit/hosttest"},
	{"host/command"},
	{"cmd", "examples"},
}

// testsOfTheWhole are packages whose tests run a host, which is below them in the layout.
var testsOfTheWhole = map[string][]string{"host": {"host/internal/testkit/hosttest"}, "host/internal/replay": {"host/internal/testkit/hosttest"},
	"host/client": {"host", "host/internal/config"}, "host/internal/server": {"host/internal/testkit/sizestest"}}

// harness is what no package but of tests imports. Only testkit is below host/internal: Go lets tests of abi, plugins, gds and
// staging import nothing there.
var harness = []string{"abi/testenv", "gds/gdstest", "host/internal/testkit"}

func isHarness(path string) bool {
	return slices.ContainsFunc(harness, func(of string) bool { return strings.HasPrefix(path+"/", module+"/"+of+"/") })
}

func rowOf(t *testing.T, path string) (row int, prefix string) {
	rel := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
	for i, prefixes := range rows {
		for _, p := range prefixes {
			if (rel == p || strings.HasPrefix(rel, p+"/")) && len(p) > len(prefix) {
				row, prefix = i, p
			}
		}
	}
	if prefix == "" {
		t.Fatalf("%s is in no row of the layout", path)
	}
	return row, prefix
}

func TestImportDirection(t *testing.T) {
	testenv.Slow(t)
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,TestImports,XTestImports", module+"/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	d := json.NewDecoder(bytes.NewReader(out))
	packages := 0
	for {
		var p struct {
			ImportPath                         string
			Imports, TestImports, XTestImports []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		packages++
		row, family := rowOf(t, p.ImportPath)
		for _, imp := range ours(p.Imports) {
			if r, f := rowOf(t, imp); r >= row && f != family {
				t.Errorf("%s (row %d) imports %s (row %d)", p.ImportPath, row, imp, r)
			}
			if isHarness(imp) && !isHarness(p.ImportPath) {
				t.Errorf("%s, which is not of the harness of the tests, imports %s", p.ImportPath, imp)
			}
		}
		// A test may use what stands beside its package, but nothing below it.
		for _, imp := range ours(append(p.TestImports, p.XTestImports...)) {
			if r, f := rowOf(t, imp); r > row && f != family && !slices.Contains(testsOfTheWhole[family], f) {
				t.Errorf("tests of %s (row %d) import %s (row %d)", p.ImportPath, row, imp, r)
			}
		}
	}
	if packages < 5 {
		t.Fatalf("go list named only %d packages", packages)
	}
}

// ours are the imports that are packages of this module.
func ours(imports []string) (list []string) {
	for _, imp := range imports {
		if imp == module || strings.HasPrefix(imp, module+"/") {
			list = append(list, imp)
		}
	}
	return list
}

func TestNames(t *testing.T) {
	out, err := exec.Command("go", "list", module+"/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for path := range strings.FieldsSeq(string(out)) {
		for part := range strings.SplitSeq(path, "/") {
			switch part {
			case "util", "utils", "common", "helpers", "misc":
				t.Errorf("%s: a package name that says nothing about its content", path)
			}
		}
	}
}

// The top level is fixed: what the project's owner named, go.sum, LICENSE and dot files.
func TestTopLevel(t *testing.T) {
	testenv.Need(t, testenv.Git)
	if _, err := os.Stat("../.git"); errors.Is(err, fs.ErrNotExist) {
		t.Skip("not a git checkout")
	}
	out, err := exec.Command("git", "-C", "..", "ls-files").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	allowed := map[string]bool{}
	for _, name := range []string{
		"go.mod", "go.sum", "host", "plugins", "abi", "gds", "staging", "cmd", "examples", "Makefile", "README.md", "LICENSE",
	} {
		allowed[name] = true
	}
	for path := range strings.FieldsSeq(string(out)) {
		top, _, _ := strings.Cut(path, "/")
		if !allowed[top] && !strings.HasPrefix(top, ".") {
			t.Errorf("%s: not allowed at the top level", path)
		}
	}
}
