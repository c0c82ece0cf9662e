package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// buildSection is the custom section with the digest of a module's inputs.
const buildSection = "kvhost.build"

// flags keep the names of functions, without which no guest stack would be readable ("-s" would drop them). They leave
// out DWARF, paths and version control stamps.
var flags = []string{"-buildmode=c-shared", "-ldflags=-w", "-trimpath", "-buildvcs=false"}

type pkg struct {
	ImportPath string
	Dir        string
	BuildID    string // identifies sources, Go version and flags
	Deps       []string
}

type builder struct {
	root     string // root of the Go module
	work     string // temporary directory
	packages map[string]*pkg
	byDir    map[string]*pkg
}

// command returns a command of the go tool for the wasm target, without the settings in the caller's environment.
func (b *builder) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.root
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0", "GOFLAGS=", "GOWASM=",
		"GOEXPERIMENT=")
	return cmd
}

// overlay returns the flag for the file in which the go tool finds the main packages.
func (b *builder) overlay() string { return "-overlay=" + filepath.Join(b.work, "overlay.json") }

// writeMains writes the main package of each plugin. It is generated from the manifest and is not in any directory.
func (b *builder) writeMains(plugins []plugin) error {
	files := map[string]string{}
	for _, p := range plugins {
		file := filepath.Join(b.work, p.name+".go")
		files[filepath.Join(p.dir, "wasm", "main.go")] = file
		if err := os.WriteFile(file, []byte(p.main()), 0o600); err != nil {
			return err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": files})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.work, "overlay.json"), text, 0o600)
}

// main returns the text of a plugin's main package.
func (p *plugin) main() string {
	const module = "github.com/kvhost/kvhost/"
	var imports, exports strings.Builder
	for _, role := range p.manifest.Roles {
		fmt.Fprintf(&imports, "\t%q\n", module+"abi/guest/export/"+role)
		fmt.Fprintf(&exports, "func init() { %s.Export(%s.New) }\n\n", role, p.name)
	}
	if p.manifest.StateFormat != "" {
		fmt.Fprintf(&imports, "\t_ %q\n", module+"abi/guest/export/state")
	}
	fmt.Fprintf(&imports, "\t%q\n", module+"plugins/"+p.name)
	return "//go:build wasip1\n\npackage main\n\nimport (\n" + imports.String() + ")\n\n" + exports.String() + "func main() {}\n"
}

// list compiles all plugins that are not compiled yet in one run of the go tool.
func (b *builder) list(ctx context.Context, plugins []plugin) error {
	if err := b.writeMains(plugins); err != nil {
		return err
	}
	args := append([]string{"list", b.overlay(), "-deps", "-export", "-json=ImportPath,Dir,BuildID,Deps"}, flags...)
	for _, p := range plugins {
		args = append(args, filepath.Join(p.dir, "wasm"))
	}
	text, err := b.command(ctx, args...).Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	b.packages, b.byDir = map[string]*pkg{}, map[string]*pkg{}
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		p := new(pkg)
		if err := d.Decode(p); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("go list: %w", err)
		}
		b.packages[p.ImportPath] = p
		b.byDir[p.Dir] = p
	}
}

// digest returns the digest of all inputs of a plugin.
func (b *builder) digest(p plugin) (string, error) {
	main, ok := b.byDir[filepath.Join(p.dir, "wasm")]
	if !ok {
		return "", fmt.Errorf("go list did not name %s", p.dir)
	}
	h := sha256.New()
	fmt.Fprintf(h, "%q\n%q\n", flags, p.text)
	for _, path := range append(slices.Clone(main.Deps), main.ImportPath) {
		if dep := b.packages[path]; dep != nil {
			fmt.Fprintf(h, "%s %s\n", path, dep.BuildID)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// build builds one module, unless one of the given modules of earlier runs is current.
func (b *builder) build(ctx context.Context, p plugin, found ...[]byte) (module []byte, built bool, err error) {
	digest, err := b.digest(p)
	if err != nil {
		return nil, false, err
	}
	for _, old := range found {
		if mark, _, err := abi.CustomSection(old, buildSection); err == nil && string(mark) == digest {
			return old, false, nil
		}
	}
	raw := filepath.Join(b.work, "module")
	args := append([]string{"build", b.overlay(), "-o", raw}, flags...)
	cmd := b.command(ctx, append(args, filepath.Join(p.dir, "wasm"))...)
	cmd.Stdout = os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, false, fmt.Errorf("go build: %w", err)
	}
	if module, err = os.ReadFile(raw); err != nil {
		return nil, false, err
	}
	if module, err = abi.WithCustomSection(module, abi.ManifestSection, p.text); err != nil {
		return nil, false, err
	}
	module, err = abi.WithCustomSection(module, buildSection, []byte(digest))
	return module, true, err
}
