package nixl

import "testing"

// TestNameInMetadata: metadata says whose it is before NIXL has it.
func TestNameInMetadata(t *testing.T) {
	const head = "nixlSerDes|Agent"
	for _, c := range []struct {
		text, name string
		ok         bool
	}{
		{head + "\x03\x00\x00\x00\x00\x00\x00\x00one|Conns", "one", true},
		{head + "\x00\x00\x00\x00\x00\x00\x00\x00|", "", true},
		{head + "\xff\xff\xff\xff\xff\xff\xff\xffone", "one", true},
		{head + "\x03", "", false},
		{"another format", "", false},
	} {
		if name, ok := nameIn([]byte(c.text)); name != c.name || ok != c.ok {
			t.Errorf("%q: %q, %t, want %q, %t", c.text, name, ok, c.name, c.ok)
		}
	}
}
