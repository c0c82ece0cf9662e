package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// slowSet are the tests that call testenv.Slow. One expression names them for all of their packages, so a name is slow in each of
// these, or in none.
type slowSet struct {
	names, packages map[string]bool
}

func (s slowSet) pattern() string {
	return "^(" + strings.Join(slices.Sorted(maps.Keys(s.names)), "|") + ")$"
}

// slowTests reads the test files below a directory.
func slowTests(top string) (found slowSet, err error) {
	found = slowSet{names: map[string]bool{}, packages: map[string]bool{}}
	others := map[string][]string{} // the packages of the tests that are not slow
	err = filepath.WalkDir(top, func(name string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && name != top && (strings.HasPrefix(e.Name(), ".") || e.Name() == "testdata"):
			return fs.SkipDir
		case !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(top, filepath.Dir(name))
		if err != nil {
			return err
		}
		heads := map[*ast.CallExpr]bool{}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv != nil || !strings.HasPrefix(f.Name.Name, "Test") {
				continue
			}
			if call := headCall(f); call != nil {
				heads[call] = true
				found.names[f.Name.Name], found.packages[filepath.ToSlash(dir)] = true, true
			} else {
				others[f.Name.Name] = append(others[f.Name.Name], filepath.ToSlash(dir))
			}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && isSlow(call) && !heads[call] {
				err = fmt.Errorf("%s: testenv.Slow is no test's first statement, so no group would run what it skips", files.Position(call.Pos()))
			}
			return err == nil
		})
		return err
	})
	for name := range found.names {
		for _, dir := range others[name] {
			if err == nil && found.packages[dir] {
				err = fmt.Errorf("%s is slow, and in %s it is not: give one of them another name", name, dir)
			}
		}
	}
	return found, err
}

// headCall is a test's first statement when it calls testenv.Slow.
func headCall(f *ast.FuncDecl) *ast.CallExpr {
	if f.Body == nil || len(f.Body.List) == 0 {
		return nil
	}
	if s, ok := f.Body.List[0].(*ast.ExprStmt); ok {
		if call, ok := s.X.(*ast.CallExpr); ok && isSlow(call) {
			return call
		}
	}
	return nil
}

func isSlow(call *ast.CallExpr) bool {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || f.Sel.Name != "Slow" {
		return false
	}
	x, ok := f.X.(*ast.Ident)
	return ok && x.Name == "testenv"
}
