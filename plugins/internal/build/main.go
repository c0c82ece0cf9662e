// Command build compiles the policies under plugins/ to wasm.
//
//	go run ./plugins/internal/build [-v] [-overlay file | -o dir [plugin directory ...]]
//
// A plugin is a plugins/<name> that has a manifest: its main package exports New of the package in the roles of the manifest, and is
// made for the go tool alone. The modules that an operator would choose go to plugins/dist,
// compressed, and the next build of the host embeds them. With -overlay they go to the directory of that file, which tells
// `go build -overlay` to embed them: nothing is written to the source tree. With -o, all plugins or those named go to another
// directory, uncompressed, as <name>.wasm, for policy_dir.
//
// Each module has its manifest as a custom section. A second custom section holds a digest of everything that it was
// built from (sources, manifest, Go version, flags): a module with the current digest is not built again, and the
// same inputs give the same bytes.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/plugins/dist"
)

// chosen are the policies that an operator would choose, which the host has in it.
// The others are textbook policies to compare with.
var chosen = []string{
	"lru", "fifo", "s3fifo", "prefix", "reuse", // evict
	dist.Base, "striped", "llmd", // place
	"layermajor", "blockmajor", // layout
}

func main() {
	out := flag.String("o", "", "write uncompressed modules to this `directory`")
	overlay := flag.String("overlay", "",
		"write compressed modules beside this `file`, and the file for go build -overlay")
	verbose := flag.Bool("v", false, "also print what is up to date")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *out, *overlay, *verbose, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out, overlay string, verbose bool, dirs []string) error {
	if out != "" && overlay != "" {
		return fmt.Errorf("-o and -overlay are for different uses: name one")
	}
	if out == "" && len(dirs) > 0 {
		return fmt.Errorf("the chosen plugins are embedded together: name directories only with -o")
	}
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	plugins, err := find(root, dirs)
	if err != nil {
		return err
	}
	// Not here: a directory without files yet would break a build that embeds this one at the same time.
	work, err := os.MkdirTemp("", "kvhost-policy-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	b := &builder{root: root, work: work}
	if err := b.list(ctx, plugins); err != nil {
		return err
	}
	dist := filepath.Join(root, "plugins", "dist")
	inTree := openEmbedDir(dist)
	embedded := inTree
	if overlay != "" {
		if overlay, err = filepath.Abs(overlay); err != nil {
			return err
		}
		embedded = openEmbedDir(filepath.Dir(overlay))
	}
	target := embedded
	if out != "" {
		target = &output{dir: out}
	} else {
		plugins = slices.DeleteFunc(plugins, func(p plugin) bool { return !slices.Contains(chosen, p.name) })
	}
	if err := os.MkdirAll(target.dir, 0o755); err != nil {
		return err
	}
	for _, p := range plugins {
		module, built, err := b.build(ctx, p, target.read(p.name), inTree.read(p.name))
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		path, err := target.write(p.name, module)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if built {
			fmt.Printf("built %s\n", path)
		} else if verbose {
			fmt.Printf("%s is up to date\n", path)
		}
	}
	if out != "" {
		return nil
	}
	if err := embedded.sweep(plugins); err != nil || overlay == "" {
		return err
	}
	return writeOverlay(overlay, dist, plugins)
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
	name     string
	dir      string // absolute; holds manifest.json
	text     []byte // of the manifest
	manifest abi.Manifest
}

// find takes the directories named, or every plugin of the module. The base comes first: others are compressed with it.
func find(root string, dirs []string) ([]plugin, error) {
	if len(dirs) == 0 {
		found, err := filepath.Glob(filepath.Join(root, "plugins", "*", "manifest.json"))
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
		p := plugin{name: filepath.Base(abs), dir: abs}
		if p.text, err = os.ReadFile(filepath.Join(abs, "manifest.json")); err == nil {
			p.manifest, err = abi.ParseManifest(p.text)
		}
		if err == nil && p.manifest.Name != p.name {
			err = fmt.Errorf("manifest.json calls it %q", p.manifest.Name)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d, err)
		}
		if p.name == dist.Base {
			plugins = slices.Insert(plugins, 0, p)
		} else {
			plugins = append(plugins, p)
		}
	}
	return plugins, nil
}
