package config

import (
	"strings"
	"testing"
)

// Each mistake in a file has one line of its own, which says where it is.
func TestOneErrorForEachMistake(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"a size", "[[root]]\npath = 'a'\ncapacity = \"1,5GiB\"\n", "k.toml:3: root.capacity: "},
		{"a percentage", "[[root]]\npath = 'a'\ncapacity = \"150%\"\n", "k.toml:3: root.capacity: "},
		{"a size of a policy", "[[policy]]\nmodule = 'a'\ncapacity = \"5x\"\n", "k.toml:3: policy.capacity: "},
		{"the second of two", "[[root]]\npath = 'a'\n\n[[root]]\npath = 'b'\ncapactiy = 1\n", "k.toml:6: config: unknown key: root.capactiy"},
		{"a key behind a text of lines", "[session.pins]\nmodel = \"\"\"\n[log]\nlevel = 'x'\n\"\"\"\n", "k.toml:1: config: bad value: session.pins.model"},
		{"a section", "socket = 's'\n[http]\nlisten = 1\n", "k.toml:3: config: bad value: http.listen"},
		{"a dotted key", "log.level = 'x'\n", "k.toml:1: config: bad value: log.level"},
		{"an inner table", "[[policy]]\nmodule = 'a'\n[policy.fuel]\n\ncal = 5\n", "k.toml:3: config: unknown key: policy.fuel.cal"},
		{"lists of lines", "[[policy]]\nmodule = 'a'\nroles = [\n  'evict', # ]\n]\ngrant = []\n", "k.toml:6: config: unknown key: policy.grant"},
		{"what does not fit", "[[root]]\npath = 'a'\nlevel = 99\n", "k.toml:3: config: bad value: root[0].level"},
		{"an element as a whole", "\n[[root]]\nlevel = 0\n", "k.toml:2: config: bad value: root[0].path"},
		{"another key's value", "[engine]\nslot_bytes = '64MB?'\nmax_staging_memory = '2MiB'\n", "k.toml:2: config: bad value: engine.slot_bytes"},
	} {
		file := write(t, test.text)
		_, err := Load(Source{File: file})
		if err == nil {
			t.Errorf("%s: got no error, want one", test.name)
			continue
		}
		got := strings.ReplaceAll(err.Error(), file, "k.toml")
		if lines := strings.Split(got, "\n"); len(lines) != 1 || !strings.HasPrefix(got, test.want) {
			t.Errorf("%s: got %d errors, %q, want one that begins with %q", test.name, len(lines), got, test.want)
		}
	}
	for _, size := range []string{"kv=1Gb", "kv=", "kv=150%"} {
		_, err := Load(Source{Flags: []Setting{{"root", size}}})
		if err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("--root %s: got %v, want one error", size, err)
		}
	}
}
