package main

import (
	"archive/zip"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// The manual has a page for each command, with all its flags, and one with every key.
func TestManual(t *testing.T) {
	r := &release{version: "1.2.3", epoch: time.Unix(1700000000, 0).UTC()}
	pages := t.TempDir()
	testenv.OK(t, r.manual(t.Context(), binary(t), pages))
	for name, parts := range map[string][]string{
		"kvhost.1":             {".TH KVHOST 1 2023-11-14 \"kvhost 1.2.3\"\n", "kvhost \\- keeps", ".SH EXIT CODES\n", "\\-\\-store\\-durability"},
		"kvhost-serve.1":       {".SH NAME\nkvhost-serve \\- Serve clients", ".SH USAGE\n"},
		"kvhost-policy-swap.1": {"kvhost policy swap"},
		"kvhost-reload.1":      {".TH KVHOST-RELOAD 1"},
		"kvhost.toml.5":        {"[[tenant]]", "sample_ratio = 1.0"},
	} {
		text, err := os.ReadFile(filepath.Join(pages, name))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, part := range parts {
			if !strings.Contains(string(text), part) {
				t.Errorf("%s has no %q:\n%.600s", name, part, text)
			}
		}
	}
}

// The wheel has the pages and the completions of the packages, where pip installs them below the environment's share.
func TestWheelHasTheManual(t *testing.T) {
	t.Chdir(testenv.Root())
	r := &release{version: "1.2.3", out: t.TempDir(), man: t.TempDir(), share: t.TempDir(), html: t.TempDir()}
	files := map[string]string{}
	for as, path := range map[string]string{
		"man/man1/kvhost.1": r.man + "/kvhost.1", "man/man5/kvhost.toml.5": r.man + "/kvhost.toml.5",
		"bash-completion/completions/kvhost": r.share + "/bash", "fish/vendor_completions.d/kvhost.fish": r.share + "/fish",
		"zsh/site-functions/_kvhost": r.share + "/zsh", "kvhost/manual/index.html": r.html + "/index.html",
	} {
		write(t, path, path, 0o644)
		files["kvhost-1.2.3.data/data/share/"+as] = path
	}
	testenv.OK(t, r.wheel("amd64", "LICENSE")) // for a program
	wheel, err := zip.OpenReader(filepath.Join(r.out, "kvhost-1.2.3-py3-none-manylinux_2_17_x86_64.whl"))
	testenv.OK(t, err)
	defer wheel.Close()
	for name, want := range files {
		f, err := wheel.Open(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if got, err := io.ReadAll(f); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v, want what %s has", name, got, err, want)
		}
	}
}

// Nothing in a text is taken for an instruction to roff.
func TestEscape(t *testing.T) {
	for text, want := range map[string]string{".TH": `\&.TH`, "'x": `\&'x`, `a\b --c`: `a\eb \-\-c`} {
		if got := escape(text); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}
