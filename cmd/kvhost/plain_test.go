package main

import (
	"errors"
	"strings"
	"testing"
)

// What is printed has no names of packages, and what only looks like one stays.
func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"host: policy refused: x: policy: not found: x": "policy refused: x: not found: x",
		"store: root is in use: /kv: staging: locked":   "root is in use: /kv: locked",
		"pathbench: server: x":                          "x",
		"/srv/store: is a file":                         "/srv/store: is a file",
		"f.toml:3: config: bad value: log.level":        "f.toml:3: bad value: log.level",
	} {
		if got := plain(errors.New(text)); got != want {
			t.Errorf("%q is printed as %q, want %q", text, got, want)
		}
	}
}

// A command that does not exist is answered with the one that is most like it.
func TestDidYouMean(t *testing.T) {
	dir := t.TempDir()
	for line, want := range map[string]string{
		"srve": `did you mean "serve"?`, "policy lst": `did you mean "list"?`, "foo.toml": "--config foo.toml", "--polcy x": `did you mean "--policy"?`,
	} {
		if r := finish(t, command(t, dir, strings.Fields(line)...)); r.code != exitUsage || !strings.Contains(r.stderr, want) {
			t.Errorf("kvhost %s: %d, %s", line, r.code, r.stderr)
		}
	}
}
