// Command build compiles the policies under plugins/ to wasm.
//
//	go run ./plugins/dist/build [-o dir] [-v] [plugin directory ...]
//
// Without arguments it takes every plugins/<name> that has a wasm directory. Each output is <name>.wasm with the
// manifest appended as a custom section. A second custom section holds a digest of everything that went in (sources,
// manifest, Go version, flags): an output whose digest is current is left alone, and the same inputs give the same bytes.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
)

func main() {
	out := flag.String("o", "", "output `directory` (default plugins/dist of the module)")
	verbose := flag.Bool("v", false, "say what is up to date, too")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *out, *verbose, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out string, verbose bool, dirs []string) error {
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	if out == "" {
		out = filepath.Join(root, "plugins", "dist")
	}
	if out, err = filepath.Abs(out); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	plugins, err := find(root, dirs)
	if err != nil {
		return err
	}
	b := builder{root: root, out: out}
	if err := b.list(ctx, plugins); err != nil {
		return err
	}
	for _, p := range plugins {
		built, err := b.build(ctx, p)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if built {
			fmt.Printf("built %s\n", filepath.Join(out, p.name+".wasm"))
		} else if verbose {
			fmt.Printf("%s is up to date\n", filepath.Join(out, p.name+".wasm"))
		}
	}
	return nil
}

func moduleRoot(ctx context.Context) (string, error) {
	text, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	mod := strings.TrimSpace(string(text))
	if filepath.Base(mod) != "go.mod" {
		return "", fmt.Errorf("not inside a Go module")
	}
	return filepath.Dir(mod), nil
}

type plugin struct {
	name string
	dir  string // absolute; holds manifest.json and wasm/
}

// find takes the directories named, or every plugin of the module.
func find(root string, dirs []string) ([]plugin, error) {
	if len(dirs) == 0 {
		found, err := filepath.Glob(filepath.Join(root, "plugins", "*", "wasm"))
		if err != nil {
			return nil, err
		}
		for _, d := range found {
			dirs = append(dirs, filepath.Dir(d))
		}
	}
	var plugins []plugin
	for _, d := range dirs {
		abs, err := filepath.Abs(d)
		if err != nil {
			return nil, err
		}
		if s, err := os.Stat(filepath.Join(abs, "wasm")); err != nil || !s.IsDir() {
			return nil, fmt.Errorf("%s: no wasm directory with the plugin's main package", d)
		}
		plugins = append(plugins, plugin{name: filepath.Base(abs), dir: abs})
	}
	return plugins, nil
}
