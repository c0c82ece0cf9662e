package wasmtest

import (
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// manifests are descriptions that two readers understand differently, or that do not end.
func manifests(b *builder) {
	plain := minimal(abi.RoleEvict).described("", abi.RoleEvict).Manifest
	change := func(old, next string) string { return strings.Replace(plain, old, next, 1) }
	for name, manifest := range map[string]string{
		"a name twice":          change(`"name":"hostile"`, `"name":"hostile","name":"lru"`),
		"a name in other case":  change(`"name":"hostile"`, `"name":"hostile","NAME":"lru"`),
		"an escaped name twice": change(`"name":"hostile"`, `"name":"hostile","n\u0061me":"lru"`),
		"no UTF-8":              change("hostile", "host\xffile"),
		"control characters":    change("hostile", `\u001b[2J\u0000`),
		"a name of a megabyte":  change("hostile", strings.Repeat("h", 1<<20)),
		"a long name":           change("hostile", strings.Repeat("h", 60_000)),
		"a path as a name":      change("hostile", "../../etc/passwd"),
		"many counters":         change(`"abi":1`, `"abi":1,"counters":["`+strings.Repeat(`c","`, 60_000)+`c"]`),
		"deep objects":          change(`"abi":1`, `"abi":1,"config":`+strings.Repeat(`{"a":`, 10_000)+`1`+strings.Repeat(`}`, 10_000)),
		"deep lists":            change(`"abi":1`, `"abi":1,"counters":`+strings.Repeat(`[`, 30_000)+strings.Repeat(`]`, 30_000)),
		"huge numbers":          change(`"abi":1`, `"abi":1,"memory_pages":1e300`),
		"negative numbers":      change(`"abi":1`, `"abi":1,"memory_pages":-1`),
		"all the memory":        change(`"abi":1`, `"abi":1,"memory_pages":4294967295`),
		"all the fuel":          change(`"abi":1`, `"abi":1,"fuel":{"call":18446744073709551615,"record":18446744073709551615}`),
		"all victims ahead":     change(`"abi":1`, `"abi":1,"victims_ahead":4294967295`),
		"unknown grants":        change(`"abi":1`, `"abi":1,"grants":["network","files"]`),
		"roles it lacks":        change(`["evict"]`, `["evict","place"]`),
		"a role twice":          change(`["evict"]`, `["evict","evict"]`),
		"a future host":         change(`"abi":1`, `"abi":1,"min_host":"999.0"`),
		"a host of words":       change(`"abi":1`, `"abi":1,"min_host":"`+strings.Repeat("9", 60)+`"`),
		"settings of no type":   change(`"abi":1`, `"abi":1,"config":{"a=b\n":{"type":"code"}}`),
		"text after it":         plain + plain,
		"half of it":            plain[:len(plain)/2],
		"nothing":               " ",
		"a list":                "[" + plain + "]",
	} {
		a := minimal(abi.RoleEvict)
		a.Manifest = manifest
		b.addf(abi.RoleEvict, a, "%s", name)
	}
	two := minimal(abi.RoleEvict).described("", abi.RoleEvict)
	b.addf(abi.RoleEvict, two.Ending(Custom(abi.ManifestSection, []byte(plain))), "two sections")
}

// buffers are modules with buffers outside their memory, over one another, or where the host must not write.
func buffers(b *builder) {
	for _, role := range []abi.Role{abi.RoleEvict, abi.RoleAdmit, abi.RolePlace, abi.RoleLayout} {
		for name, body := range map[string][]byte{
			"no buffer":              I32(0),
			"not aligned":            I32(bufferBase + 8),
			"at the end":             I32(basePages << 16),
			"across the end":         I32(basePages<<16 - 16),
			"beyond a size":          I32(-16),
			"all in one place":       I32(bufferBase),
			"moved with each call":   Join(counting(1024), I32(20), []byte{0x74}, I32(bufferBase), []byte{opAdd}),
			"overlapping by 16":      Join(local(0), I32(10), []byte{0x74}, I32(bufferBase), []byte{opAdd}),
			"after a trap elsewhere": Join(when(Join(local(0), I32(2), []byte{opEq}), unreachable), bufferBody()),
		} {
			b.addf(role, minimal(role).with(abi.ExportBuffer, body), "%s as %s", name, role)
		}
	}
}
