package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// manual writes manual pages into a directory: kvhost.1, one for each subcommand, and kvhost.toml.5. Their content is the help
// of a binary that can run here.
func (r *release) manual(ctx context.Context, binary, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	run := func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, binary, args...).Output()
		if err != nil {
			return "", fmt.Errorf("%s %s: %w", binary, strings.Join(args, " "), err)
		}
		return string(out), nil
	}
	var page func(words []string, short string) error
	page = func(words []string, short string) error {
		help, err := run(append(words, "--help-all")...)
		if err != nil {
			help, err = run(append(words, "--help")...) // the command has no settings
		}
		if err != nil {
			return err
		}
		name := strings.Join(append([]string{"kvhost"}, words...), "-")
		if err := os.WriteFile(filepath.Join(dir, name+".1"), []byte(r.page(name, "1", short, help)), 0o644); err != nil {
			return err
		}
		list, err := run(append(append([]string{"__complete"}, words...), "")...)
		if err != nil || len(words) > 1 {
			return err
		}
		for line := range strings.Lines(list) {
			command, what, ok := strings.Cut(strings.TrimSpace(line), "\t")
			if !ok || command == "help" || command == "completion" {
				continue
			}
			if err := page(append(words[:len(words):len(words)], command), what); err != nil {
				return err
			}
		}
		return nil
	}
	if err := page(nil, "keeps the KV cache of LLM serving engines on storage"); err != nil {
		return err
	}
	defaults, err := run("config", "--defaults")
	if err != nil {
		return err
	}
	text := r.page("kvhost.toml", "5", "configuration of kvhost", "  "+strings.ReplaceAll(defaults, "\n", "\n  "))
	return os.WriteFile(filepath.Join(dir, "kvhost.toml.5"), []byte(text), 0o644)
}

// shared writes completions for shells, and the changelog with absolute links.
func (r *release) shared(ctx context.Context, binary, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		out, err := exec.CommandContext(ctx, binary, "completion", shell).Output()
		if err != nil {
			return fmt.Errorf("completion %s: %w", shell, err)
		}
		if err := os.WriteFile(filepath.Join(dir, shell), out, 0o644); err != nil {
			return err
		}
	}
	const changes = ".github/CHANGELOG.md"
	text, err := os.ReadFile(changes)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, filepath.Base(changes)), linked(changes, text), 0o644)
}

var link = regexp.MustCompile(`\]\([^)#:]+`)

// linked makes the relative links of a document absolute.
func linked(name string, text []byte) []byte {
	return link.ReplaceAllFunc(text, func(to []byte) []byte {
		return []byte("](https://github.com/kvhost/kvhost/blob/main/" + path.Join(path.Dir(name), string(to[2:])))
	})
}

// page converts a text to roff. A line at the left that ends in a colon is a heading, indented lines stay unchanged, and the
// rest is filled.
func (r *release) page(name, section, short, text string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s %s %s \"kvhost %s\"\n.SH NAME\n%s \\- %s\n.SH DESCRIPTION\n", strings.ToUpper(name), section,
		r.epoch.Format("2006-01-02"), r.version, name, escape(short))
	literal := false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if indented := strings.HasPrefix(line, "  "); line != "" && indented != literal {
			literal = indented
			b.WriteString(map[bool]string{true: ".nf\n", false: ".fi\n"}[literal])
		}
		switch title, heading := strings.CutSuffix(line, ":"); {
		case line == "" && !literal:
			b.WriteString(".PP\n")
		case heading && !literal:
			fmt.Fprintf(&b, ".SH %s\n", strings.ToUpper(escape(title)))
		default:
			b.WriteString(escape(strings.TrimPrefix(line, "  ")) + "\n")
		}
	}
	return b.String()
}

// escape escapes the characters of a line that roff would interpret.
func escape(line string) string {
	line = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(line)
	if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
		line = `\&` + line
	}
	return line
}

// pages returns the file names of a manual in a directory that this program has written.
func pages(dir string) (names []string) {
	files, _ := os.ReadDir(dir)
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}
