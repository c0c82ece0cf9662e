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

// Templates are files with words such as {NAME} in them. They do not use text/template, because it calls methods by
// name, so that the linker would keep every exported method of the program.
//
//go:embed templates
var templates embed.FS

// goModule is the part of this module that guests need.
const goModule = "module github.com/kvhost/kvhost\n\ngo 1.26\n"

var (
	policyLanguages = []string{"go", "c", "rust"}
	goodPolicyName  = regexp.MustCompile(`^[a-z]([a-z0-9_-]{0,61}[a-z0-9])?$`)
)

// beginnings holds, by role, the initial content of a project's manifest and policy. The memory of an evict policy depends on the number of
// slots, which can be any number.
var beginnings = map[string]struct{ pages, does, more string }{
	"evict": {"65536", "Evicts what was not used since the hand last came by.",
		`"config": { "chances": { "type": "int", "default": "1", "help": "rounds of the hand that a use is good for, 1 to 255" } }`},
	"admit": {"256", "Stores what is near the beginning of a prompt, or was continued.", `"min_host": "0.2",
  "config": { "depth": { "type": "int", "default": "64", "help": "chunks from the beginning that are always stored" } }`},
	"place":  {"256", "Names pieces by key in a directory for each namespace.", `"min_host": "0.3"`},
	"layout": {"256", "Orders a chunk's pages by layer.", `"config": {}`},
}

// newProject writes a project into dir, which must be empty or missing. The policy gets the name of the directory. The kit for
// its language is copied into the project, so that it builds without a network and uses the ABI of the host that created it.
func newProject(dir, language, role string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	name := filepath.Base(dir)
	if !goodPolicyName.MatchString(name) {
		return usageError{fmt.Errorf("bad name %q: want small letters, digits, _ and - within, a letter first", name)}
	}
	if !slices.Contains(policyLanguages, language) {
		return usageError{fmt.Errorf("unknown language %q (there are %s)", language, strings.Join(policyLanguages, ", "))}
	}
	begins, known := beginnings[role]
	if !known {
		return usageError{fmt.Errorf("unknown role %q (evict, admit, place, layout)", role)}
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return usageError{fmt.Errorf("%s: directory is not empty", dir)}
	}
	grants := ""
	if language == "go" {
		grants = `"wasi-stub"`
	}
	fill := strings.NewReplacer("{NAME}", name, "{LANGUAGE}", language, "{GRANTS}", grants, "{ROLE}", role,
		"{DOES}", begins.does, "{MORE}", begins.more, "{PAGES}", begins.pages)
	parts := []string{"all", language, language + "-" + role} // if two directories have the same file, the later one is used
	err = eachFile(templates, "templates", func(file, text string) error {
		part, file, _ := strings.Cut(file, "/")
		if !slices.Contains(parts, part) {
			return nil
		}
		to := strings.TrimPrefix(strings.TrimSuffix(file, ".tmpl"), "dot")
		return writeProject(fill.Replace(text), dir, strings.ReplaceAll(to, "NAME", name))
	})
	if err != nil {
		return err
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

// eachFile calls f for each file below root, with its path relative to root.
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
