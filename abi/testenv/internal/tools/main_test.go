package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// run is the command on a machine that has only Go and these commands.
func run(t *testing.T, commands []string, environment ...string) (output string, code int) {
	t.Helper()
	bin := t.TempDir()
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(goTool, filepath.Join(bin, "go")); err != nil {
		t.Fatal(err)
	}
	for _, name := range commands {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(binary)
	cmd.Env = append([]string{"PATH=" + bin, "HOME=" + t.TempDir()}, environment...)
	out, err := cmd.CombinedOutput()
	if _, exited := err.(*exec.ExitError); err != nil && !exited {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

var binary string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvhost-tools-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "tools")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		panic(string(out))
	}
	return m.Run()
}

// On a machine with Go alone the list names every tool that the kernel does not have, once, with what is left out and what brings it.
func TestMachineWithGoAlone(t *testing.T) {
	got, code := run(t, nil)
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, tool := range testenv.Tools {
		line := "      without " + tool.Name + ": " + tool.Fix()
		kernels := tool.Have() && slices.Contains([]*testenv.Tool{
			testenv.UserFaults, testenv.MemoryCgroup, testenv.DirectIO, testenv.Devices,
		}, tool)
		if listed := strings.Count(got, line) == 1; listed != (tool.After == nil && !kernels) {
			t.Errorf("listed %v: %s", listed, line)
		}
	}
	const all = "All of it on Debian: apt-get install --no-install-recommends make git gcc libc6-dev clang lld cargo libstd-rust-dev-wasm32 minisign python3-venv chromium chromium-driver prometheus systemd dpkg rpm mmdebstrap buildah\n"
	if !strings.HasSuffix(got, all) {
		t.Errorf("the last line is not %q:\n%s", all, got)
	}
	if again, code := run(t, nil, testenv.Require+"=1"); code != 1 || again != got {
		t.Errorf("where tools are required: exit code %d, want 1:\n%s", code, again)
	}
}

// What the machine has is not listed.
func TestToolsAtHand(t *testing.T) {
	got, _ := run(t, []string{"make"})
	if strings.Contains(got, testenv.Make.Tests) || !strings.Contains(got, testenv.Clang.Tests) {
		t.Errorf("make is there, clang is not:\n%s", got)
	}
}

// The Makefile asks for one tool.
func TestOneTool(t *testing.T) {
	for name, tool := range short {
		cmd := exec.Command(binary, name)
		out, err := cmd.CombinedOutput()
		if want := tool.Have(); (err == nil) != want || len(out) > 0 {
			t.Errorf("%s: %v %q, the machine has it: %v", name, err, out, want)
		}
	}
	if out, err := exec.Command(binary, "nonsense").CombinedOutput(); err == nil ||
		!strings.Contains(string(out), `no tool "nonsense"`) {
		t.Errorf("an unknown tool: %v %s", err, out)
	}
}
