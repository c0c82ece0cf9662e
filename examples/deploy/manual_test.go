package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// The manual has a page for each command, with all its flags, and one with every key.
func TestManual(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "kvhost")
	build := exec.Command("go", "build", "-o", binary, "./cmd/kvhost")
	build.Dir, build.Env = testenv.Root(), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build kvhost: %v\n%s", err, out)
	}
	r := &release{version: "1.2.3", epoch: time.Unix(1700000000, 0).UTC()}
	pages := filepath.Join(dir, "man")
	testenv.OK(t, r.manual(t.Context(), binary, pages))
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

// Nothing in a text is taken for an instruction to roff.
func TestEscape(t *testing.T) {
	for text, want := range map[string]string{".TH": `\&.TH`, "'x": `\&'x`, `a\b --c`: `a\eb \-\-c`} {
		if got := escape(text); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}
