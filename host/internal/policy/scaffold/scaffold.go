package scaffold

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"text/template"

	"github.com/kvhost/kvhost/abi"
	ckit "github.com/kvhost/kvhost/abi/c"
	rustkit "github.com/kvhost/kvhost/abi/rust"
)

// Errors of New.
var (
	// ErrName: the name cannot be that of a file, a crate and a package alike.
	ErrName = errors.New("scaffold: bad name")
	// ErrLanguage: there is no kit for the language.
	ErrLanguage = errors.New("scaffold: unknown language")
	// ErrExists: the directory has something in it.
	ErrExists = errors.New("scaffold: directory is not empty")
)

//go:embed templates
var templates embed.FS

// kit is what is copied into a project, to the directory kvhost.
type kit struct {
	files fs.FS
	to    func(file string) string // where a file goes in there; empty for nowhere
	extra map[string]string
}

func asItIs(file string) string { return file }

// goModule is the part of this module that guests need.
const goModule = "module github.com/kvhost/kvhost\n\ngo 1.26\n"

var kits = map[string]kit{
	"c":    {files: ckit.Files, to: asItIs},
	"rust": {files: rustkit.Files, to: asItIs},
	"go": {files: abi.Sources, extra: map[string]string{"go.mod": goModule}, to: func(file string) string {
		if strings.HasSuffix(file, "_test.go") || file == "sources.go" {
			return ""
		}
		return "abi/" + file
	}},
}

// Languages that there are kits for.
const Languages = "go, c, rust"

var goodName = regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)

// New writes a project into dir, which must be empty or not there. The policy is called like the directory.
func New(dir, language string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	name := filepath.Base(dir)
	if !goodName.MatchString(name) {
		return fmt.Errorf("%w: %q: want small letters, digits and _, a letter first", ErrName, name)
	}
	k, ok := kits[language]
	if !ok {
		return fmt.Errorf("%w: %q (there are %s)", ErrLanguage, language, Languages)
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return fmt.Errorf("%w: %s", ErrExists, dir)
	}
	if err := project(dir, language, name); err != nil {
		return err
	}
	for file, text := range k.extra {
		if err := put(filepath.Join(dir, "kvhost", file), []byte(text)); err != nil {
			return err
		}
	}
	return each(k.files, ".", func(file string, text []byte) error {
		if to := k.to(file); to != "" {
			return put(filepath.Join(dir, "kvhost", to), text)
		}
		return nil
	})
}

// project writes what is made from templates: those of the language and those of all.
func project(dir, language, name string) error {
	for _, part := range []string{language, "all"} {
		root := path.Join("templates", part)
		err := each(templates, root, func(file string, text []byte) error {
			t, err := template.New(file).Delims("{%", "%}").Parse(string(text))
			if err != nil {
				return err
			}
			var b bytes.Buffer
			if err := t.Execute(&b, map[string]string{"Name": name, "Language": language}); err != nil {
				return err
			}
			to := strings.TrimPrefix(strings.TrimSuffix(strings.TrimPrefix(file, root+"/"), ".tmpl"), "dot")
			return put(filepath.Join(dir, strings.ReplaceAll(to, "NAME", name)), b.Bytes())
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func each(files fs.FS, root string, f func(file string, text []byte) error) error {
	return fs.WalkDir(files, root, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(files, file)
		if err != nil {
			return err
		}
		return f(file, text)
	})
}

func put(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}
