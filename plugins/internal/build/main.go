// Command build compiles the policies under plugins/ to wasm.
//
//	go run ./plugins/internal/build [-v] [-overlay file | -o dir [plugin directory ...]]
//
// A plugin is a directory plugins/<name> with a manifest. Its main package exists only during the build: it registers the package's New for
// the roles of the manifest. The modules that an operator would choose are written to plugins/dist in compressed form, and the next build
// of the host embeds them. With -overlay they are written next to the given file, which tells `go build -overlay` to embed them, and the
// source tree stays unchanged. With -o, all plugins or the named ones are written to another directory as <name>.wasm, uncompressed, for
// policy_dir.
//
// Each module has its manifest as a custom section. A second custom section holds a digest of all inputs (sources,
// manifest, Go version, flags). A module with the current digest is not built again. The same inputs give the same
// bytes.
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

// chosen lists the policies that the host embeds, which are those that an operator would choose. The others are
// textbook policies for comparison.
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
	// The directory is not below the source tree: a directory without files would break a build of the host that embeds
	// plugins/dist at the same time.
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
	dir      string // absolute path; contains manifest.json
	text     []byte // text of the manifest
	manifest abi.Manifest
}

// find returns the plugins in the given directories, or all plugins of the module. The base comes first, because the
// others are compressed with it.
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
