package abi

import (
	"encoding/json"
	"strings"
	"testing"
)

const goodManifest = `{
  "name": "lru", "version": "1.2.0", "abi": 1, "description": "d", "roles": ["evict", "admit"], "grants": ["clock", "wasi-stub"],
  "memory_pages": 64, "fuel": {"call": 2000, "record": 64}, "counters": ["hits"],
  "config": {"window": {"type": "int", "default": "10", "unit": "entries", "help": "h"}}, "state_format": "lru/1", "victims_ahead": 64, "min_host": "0.1"
}`

func TestParseManifest(t *testing.T) {
	m, err := ParseManifest([]byte(goodManifest))
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "lru" || len(m.Roles) != 2 || m.Fuel.Record != 64 || m.Config["window"].Default != "10" || m.MemoryPages != 64 || m.VictimsAhead != 64 {
		t.Errorf("%+v", m)
	}
}

func TestParseManifestRefuses(t *testing.T) {
	for _, c := range []struct{ old, new, says string }{
		{`"name": "lru"`, `"name": ""`, "no name"},
		{`"name": "lru"`, `"nmae": "lru"`, "nmae"},
		{`"abi": 1`, `"abi": 2`, "made for ABI 2, this host speaks 1"},
		{`"abi": 1`, `"abi": "1"`, "abi"},
		{`["evict", "admit"]`, `[]`, "names no roles"},
		{`"admit"`, `"admission"`, `unknown role "admission"`},
		{`"admit"`, `"evict"`, "names role evict twice"},
		{`"clock"`, `"network"`, `unknown grant "network"`},
		{`"memory_pages": 64`, `"memory_pages": 70000`, "memory_pages"},
		{`"type": "int"`, `"type": "integer"`, `unknown type "integer"`},
		{`"default": "10"`, `"default": "ten"`, `default "ten" of window is not of type int`},
		{`"victims_ahead": 64`, `"victims_ahead": 257`, "victims_ahead 257, at most 256"},
		{`["evict", "admit"]`, `["admit"]`, "victims_ahead is for the role evict"},
		{`["hits"]`, `["hits", "hits"]`, "counter hits twice"},
		{`"0.1"` + "\n}", `"0.1"` + "\n} x", "after the object"},
		{`"0.1"` + "\n}", `"0.1"`, "manifest"},
	} {
		text := strings.Replace(goodManifest, c.old, c.new, 1)
		if text == goodManifest {
			t.Fatalf("%q is not in the manifest", c.old)
		}
		if _, err := ParseManifest([]byte(text)); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want %q", c.new, err, c.says)
		}
	}
}

// What parses is valid, and parses again to the same.
func FuzzParseManifest(f *testing.F) {
	f.Add([]byte(goodManifest))
	f.Add([]byte(`{"name":"x","version":"","abi":1,"roles":["place"]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := ParseManifest(text)
		if err != nil {
			return
		}
		if err := m.Validate(); err != nil {
			t.Fatalf("parsed, but %v", err)
		}
		again, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		n, err := ParseManifest(again)
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		if twice, _ := json.Marshal(n); string(twice) != string(again) {
			t.Errorf("%s became %s", again, twice)
		}
	})
}
