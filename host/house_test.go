package host_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/kvhost/kvhost"

// rows is the house: a package imports only packages of rows above its own, or of its own subtree. The first prefix
// that matches counts, so a longer one stands before a shorter one.
var rows = []struct {
	row    int
	prefix string
}{
	{1, "abi/guest"},
	{0, "abi"},
	{3, "plugins"},
	{4, "gds"}, {4, "staging"},
	{5, "host/chunk"}, {5, "host/trace"},
	{6, "host/policy"},
	{7, "host/store"},
	{8, "host/transfer"},
	{9, "host/proto"}, {10, "host/server"}, {10, "host/client"},
	{11, "host/config"}, {11, "host/sim"}, {11, "host/replay"}, {11, "host/doctor"},
	{12, "host"},
	{13, "cmd"},
	{13, "examples"},
}

func rowOf(t *testing.T, path string) (int, string) {
	rel := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
	for _, r := range rows {
		if rel == r.prefix || strings.HasPrefix(rel, r.prefix+"/") {
			return r.row, r.prefix
		}
	}
	t.Fatalf("%s has no place in the house", path)
	return 0, ""
}

func TestImportDirection(t *testing.T) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,TestImports,XTestImports", module+"/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	d := json.NewDecoder(bytes.NewReader(out))
	packages := 0
	for {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		packages++
		row, family := rowOf(t, p.ImportPath)
		for _, imp := range p.Imports {
			if imp != module && !strings.HasPrefix(imp, module+"/") {
				continue
			}
			if r, f := rowOf(t, imp); r >= row && f != family {
				t.Errorf("%s (row %d) imports %s (row %d)", p.ImportPath, row, imp, r)
			}
		}
	}
	if packages < 5 {
		t.Fatalf("go list named only %d packages", packages)
	}
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
				t.Errorf("%s: a name that says nothing", path)
			}
		}
	}
}

// The top level is fixed: what the project's owner named, go.sum, LICENSE and dot files.
func TestTopLevel(t *testing.T) {
	out, err := exec.Command("git", "-C", "..", "ls-files").Output()
	if err != nil {
		t.Logf("not a git checkout, so nothing can be held against the house: %v", err)
		return
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
			t.Errorf("%s: nothing else may stand at the top level", path)
		}
	}
}
