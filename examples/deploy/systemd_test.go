package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// exposure is the most that `systemd-analyze security` may say of a unit, times ten. A unit without any hardening has 96.
const exposure = "20"

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	testenv.OK(t, err)
	return string(text)
}

func write(t *testing.T, name, text string, mode os.FileMode) {
	t.Helper()
	testenv.OK(t, os.MkdirAll(filepath.Dir(name), 0o755))
	testenv.OK(t, os.WriteFile(name, []byte(text), mode))
}

// machine is the root of a machine with these units, kvhost, and the targets of systemd.
func machine(t *testing.T, units map[string]string) string {
	t.Helper()
	root := t.TempDir()
	at := filepath.Join(root, "usr/lib/systemd/system")
	targets, err := filepath.Glob("/usr/lib/systemd/system/*.target")
	if err != nil || len(targets) == 0 {
		t.Fatalf("no targets of systemd: %v", err)
	}
	for _, name := range targets {
		f, err := os.Open(name)
		if err != nil {
			continue // a link to a target that is not installed
		}
		text, err := io.ReadAll(f)
		f.Close()
		testenv.OK(t, err)
		write(t, filepath.Join(at, filepath.Base(name)), string(text), 0o644)
	}
	for name, text := range units {
		write(t, filepath.Join(at, name), text, 0o644)
	}
	for _, command := range []string{"usr/bin/kvhost", "bin/sh"} {
		write(t, filepath.Join(root, command), "#!/bin/sh\n", 0o755)
	}
	return root
}

func analyze(args ...string) (string, error) {
	out, err := exec.Command("systemd-analyze", args...).CombinedOutput()
	return string(out), err
}

// units are those that are shipped.
func units(t *testing.T) map[string]string {
	return map[string]string{
		"kvhost.service": read(t, "systemd/kvhost.service"), "kvhost@.service": read(t, "systemd/kvhost@.service"),
	}
}

// systemd takes the units without a word, and finds them hardened.
func TestUnits(t *testing.T) {
	testenv.Need(t, testenv.Systemd)
	root := machine(t, units(t))
	for _, name := range []string{"kvhost.service", "kvhost@second.service"} {
		if out, err := analyze("verify", "--root="+root, name); err != nil || strings.TrimSpace(out) != "" {
			t.Errorf("verify %s: %v\n%s", name, err, out)
		}
		if unit := units(t)["kvhost.service"]; regexp.MustCompile(`(?m)^RestrictSUIDSGID=`).MatchString(unit) {
			t.Error("RestrictSUIDSGID= forbids openat2, without which the host opens no root")
		}
		if out, err := analyze("security", "--offline=yes", "--no-pager", "--threshold="+exposure, "--root="+root,
			name); err != nil {
			t.Errorf("security %s: %v\n%s", name, err, out)
		}
	}
}

// The two units differ in names only, so that what is learned of one holds for the other.
func TestTemplateUnit(t *testing.T) {
	comment := regexp.MustCompile(`(?m)^#.*\n`)
	names := strings.NewReplacer("kvhost-%i", "kvhost", "kvhost %i", "kvhost", "/etc/kvhost/%i.toml", "/etc/kvhost/kvhost.toml")
	all := units(t)
	one, template := comment.ReplaceAllString(all["kvhost.service"], ""), comment.ReplaceAllString(all["kvhost@.service"], "")
	if names.Replace(template) != one || template == one {
		t.Errorf("kvhost@.service is\n%s\nkvhost.service is\n%s", template, one)
	}
}
