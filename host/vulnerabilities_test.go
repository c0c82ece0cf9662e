package host_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// make vulnerabilities fails when it finds some, when it lacks its tool, and when it reaches no database, unless it is told that
// this is so. It names the reason each time.
func TestVulnerabilitiesAreNotLeftOutSilently(t *testing.T) {
	testenv.Need(t, testenv.Make)
	dir := t.TempDir()
	const unreachable = `echo 'govulncheck: fetching vulnerabilities: Get "https://vuln.go.dev/index/modules.json.gz": dial tcp' >&2; exit 1`
	for _, c := range []struct {
		name, script, option string
		fails                bool
		says                 string
	}{
		{"none", `echo No vulnerabilities found.`, "", false, "No vulnerabilities found."},
		{"some", `echo 'Vulnerability #1: GO-2030-0001'; exit 3`, "", true, "GO-2030-0001"},
		{"some, and unchecked", `echo 'Vulnerability #1: GO-2030-0001'; exit 3`, "VULNERABILITIES=unchecked", true, "GO-2030-0001"},
		{"unreachable", unreachable, "", true, "GOVULNDB"},
		{"unreachable, and unchecked", unreachable, "VULNERABILITIES=unchecked", false, "left out: vulnerabilities"},
		{"no tool", "", "", true, "make tools"},
	} {
		tool := filepath.Join(dir, strings.ReplaceAll(c.name, " ", "-"))
		if c.script != "" {
			testenv.OK(t, os.WriteFile(tool, []byte("#!/bin/sh\n"+c.script+"\n"), 0o700))
		}
		cmd := exec.Command("make", "-C", "..", "--no-print-directory", "vulnerabilities", "GOVULNCHECK="+tool)
		if c.option != "" {
			cmd.Args = append(cmd.Args, c.option)
		}
		cmd.Env = append(os.Environ(), testenv.Require+"=")
		out, err := cmd.CombinedOutput()
		if (err != nil) != c.fails || !strings.Contains(string(out), c.says) {
			t.Errorf("with the tool %s: %v\n%s", c.name, err, out)
		}
	}
}
