package host_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Limits of a type and of a package.
const (
	maxMethods       = 40
	maxFields        = 25
	maxLines         = 3500 // of a package without its tests
	maxTransferLines = 4095 // of host/transfer itself; compressed pieces took 230, and those that a GPU codes 355
	maxGDSLines      = 3800 // of gds itself; the codec on the GPU took 240
	maxStoreLines    = 4680 // of host/store itself; compressed pieces took 50
	generatedHeader  = "// Code generated"
)

// tables are structs of figures, settings or bindings: they have as many fields as there are things to list.
var tables = map[string]string{
	"fields of gds.cudaFunctions":       "bindings: the functions of libcuda",
	"fields of host/store/figures.Root": "figures: what a root counts",
}

// goFiles are the files of every package without tests, by import path.
func goFiles(t *testing.T) map[string][]string {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Dir,GoFiles", module+"/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	files := map[string][]string{}
	d := json.NewDecoder(bytes.NewReader(out))
	for {
		var p struct {
			ImportPath, Dir string
			GoFiles         []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return files
		} else if err != nil {
			t.Fatal(err)
		}
		for _, f := range p.GoFiles {
			path := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
			files[path] = append(files[path], filepath.Join(p.Dir, f))
		}
	}
}

func TestSizes(t *testing.T) {
	used := map[string]bool{}
	for pkg, files := range goFiles(t) {
		lines := 0
		methods, fields := map[string]int{}, map[string]int{}
		for _, name := range files {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.HasPrefix(text, []byte(generatedHeader)) {
				continue
			}
			lines += bytes.Count(text, []byte("\n"))
			countTypes(t, name, text, methods, fields)
		}
		report := func(what string, n, limit int) {
			if _, ok := tables[what]; ok && n > limit {
				used[what] = true
			} else if n > limit {
				t.Errorf("%s: %d, at most %d", what, n, limit)
			}
		}
		limit := maxLines
		switch pkg {
		case "gds":
			limit = maxGDSLines
		case "host/store":
			limit = maxStoreLines
		case "host/transfer":
			limit = maxTransferLines
		}
		report("lines of "+pkg, lines, limit)
		for name, n := range methods {
			report("methods of "+pkg+"."+name, n, maxMethods)
		}
		for name, n := range fields {
			report("fields of "+pkg+"."+name, n, maxFields)
		}
	}
	for what := range tables {
		if !used[what] {
			t.Errorf("%s: not above the limit any more; remove the exception", what)
		}
	}
}

// countTypes counts the methods and the fields of the types in one file.
func countTypes(t *testing.T, name string, text []byte, methods, fields map[string]int) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), name, text, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, decl := range f.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Recv != nil {
				methods[receiver(d.Recv.List[0].Type)]++
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if ts, ok := spec.(*ast.TypeSpec); ok {
					if s, ok := ts.Type.(*ast.StructType); ok {
						for _, field := range s.Fields.List {
							fields[ts.Name.Name] += max(1, len(field.Names))
						}
					}
				}
			}
		}
	}
}

// receiver is the name of a method's type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}
