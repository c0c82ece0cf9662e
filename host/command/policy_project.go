package command

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// Templates are files with {NAME}, {LANGUAGE} and {GRANTS} in them, not of text/template: that one calls methods by name,
// for which the linker keeps every exported method of the program.
//
//go:embed templates
var templates embed.FS

// goModule is the part of this module that guests need.
const goModule = "module github.com/kvhost/kvhost\n\ngo 1.26\n"

var (
	policyLanguages = []string{"go", "c", "rust"}
	goodPolicyName  = regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)
)

// newProject writes a project into dir, which must be empty or not there. The policy is called like the directory. The
// kit for its language is copied into it, so that it builds without a network and uses the ABI of the host that made it.
func newProject(dir, language string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	name := filepath.Base(dir)
	if !goodPolicyName.MatchString(name) {
		return usageError{fmt.Errorf("bad name %q: want small letters, digits and _, a letter first", name)}
	}
	if !slices.Contains(policyLanguages, language) {
		return usageError{fmt.Errorf("unknown language %q (there are %s)", language, strings.Join(policyLanguages, ", "))}
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return usageError{fmt.Errorf("%s: directory is not empty", dir)}
	}
	grants := ""
	if language == "go" {
		grants = `"wasi-stub"`
	}
	fill := strings.NewReplacer("{NAME}", name, "{LANGUAGE}", language, "{GRANTS}", grants)
	for _, part := range []string{language, "all"} {
		err := eachFile(templates, "templates/"+part, func(file, text string) error {
			to := strings.TrimPrefix(strings.TrimSuffix(file, ".tmpl"), "dot")
			return writeProject(fill.Replace(text), dir, strings.ReplaceAll(to, "NAME", name))
		})
		if err != nil {
			return err
		}
	}
	return copyKit(filepath.Join(dir, "kvhost"), language)
}

func copyKit(dir, language string) error {
	if language != "go" {
		return eachFile(abi.Sources, language, func(file, text string) error { return writeProject(text, dir, file) })
	}
	err := eachFile(abi.Sources, ".", func(file, text string) error {
		top, _, deeper := strings.Cut(file, "/")
		if deeper && top != "guest" || strings.HasSuffix(file, "_test.go") || file == "sources.go" {
			return nil
		}
		return writeProject(text, dir, "abi", file)
	})
	return errors.Join(err, writeProject(goModule, dir, "go.mod"))
}

// eachFile calls f with each file below root and its path from there.
func eachFile(files fs.FS, root string, f func(file, text string) error) error {
	below, err := fs.Sub(files, root)
	if err != nil {
		return err
	}
	return fs.WalkDir(below, ".", func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(below, file)
		if err != nil {
			return err
		}
		return f(file, string(text))
	})
}

func writeProject(text string, path ...string) error {
	file := filepath.Join(path...)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(text), 0o644)
}
