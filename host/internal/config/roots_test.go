package config

import (
	"strings"
	"testing"
)

// Roots are taken as people spell them, and what is no directory says so.
func TestRootsAsSpelled(t *testing.T) {
	for _, c := range []struct{ text, path, refused string }{
		{text: "/x/kv=64MiB", path: "/x/kv"},
		{text: "/x/kv/=64MiB", path: "/x/kv"},
		{text: "/x/kv//", path: "/x/kv"},
		{text: "/x/dt=2026/kv=64MiB", path: "/x/dt=2026/kv"},
		{text: "/x/dt=2026/kv", path: "/x/dt=2026/kv"},
		{text: "/=1GiB", path: "/"},
		{text: "./memory:=64MiB", path: "./memory:"},
		{text: "./memroy:=64MiB", path: "./memroy:"},
		{text: "./~/kv=64MiB", path: "./~/kv"},
		{text: "/a:b/kv=64MiB", path: "/a:b/kv"},
		{text: "memroy:=64MiB", refused: `"memroy:" is no kind of root`},
		{text: "S3://bucket/x=64MiB", refused: `"S3://bucket/x" is no kind of root`},
		{text: "~/kv=64MiB", refused: "only a shell knows the directory ~"},
		{text: "/x/kv=64MiBB", refused: "64MiBB"},
	} {
		l, err := Load(Source{Flags: []Setting{{Key: "root", Value: c.text}, {Key: "store.memory", Value: "0"}}})
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("--root %s: got %v, want an error with %q", c.text, err, c.refused)
			}
			continue
		}
		if err != nil || l.Config.Roots[0].Path != c.path {
			t.Errorf("--root %s: got %v, %v, want the path %q", c.text, l, err, c.path)
		}
	}
}
