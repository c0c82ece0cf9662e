package command

import (
	"errors"
	"testing"
)

// What is printed has no names of packages, and what only looks like one stays.
func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"host: policy refused: x: policy: not found: x": "policy refused: x: not found: x",
		"store: root is in use: /kv: staging: locked":   "root is in use: /kv: locked",
		"bench: server: x":                       "x",
		"/srv/store: is a file":                  "/srv/store: is a file",
		"f.toml:3: config: bad value: log.level": "f.toml:3: bad value: log.level",
	} {
		if got := plainError(errors.New(text)); got != want {
			t.Errorf("%q is printed as %q, want %q", text, got, want)
		}
	}
}
