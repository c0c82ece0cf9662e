package abi

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

const goodManifest = `{
  "name": "lru", "version": "1.2.0", "abi": 1, "description": "d", "roles": ["evict", "admit"], "grants": ["clock", "wasi-stub"],
  "memory_pages": 64, "fuel": {"call": 2000, "record": 64}, "counters": ["hits"],
  "config": {"window": {"type": "int", "default": "10", "unit": "entries", "help": "h"}}, "state_format": "lru/1", "victims_ahead": 64, "min_host": "0.1"
}`

func TestParseManifest(t *testing.T) {
	m, err := ParseManifest([]byte(goodManifest))
	testenv.OK(t, err)
	if m.Name != "lru" || len(m.Roles) != 2 || m.Fuel.Record != 64 || m.Config["window"].Default != "10" || m.MemoryPages != 64 || m.VictimsAhead != 64 {
		t.Errorf("the manifest parses as %+v", m)
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
		{`["hits"]`, `[""]`, "without a name"},
		{`["hits"]`, `["` + strings.Repeat("h", 65) + `"]`, "65 bytes, at most 64"},
		{`["hits"]`, `["` + strings.Repeat(`h","h`, 300) + `"]`, "at most 256 of each"},
		{`"name": "lru"`, `"name": "lru", "name": "fifo"`, `field "name" stands there twice`},
		{`"name": "lru"`, `"name": "lru", "Name": "fifo"`, `unknown field "Name"`},
		{`"name": "lru"`, `"name": "lru", "na\u006de": "fifo"`, `field "name" stands there twice`},
		{`{"call": 2000,`, `{"Call": 1, "call": 2000,`, `unknown field "Call"`},
		{`{"type": "int",`, `{"type": "string", "type": "int",`, `field "type" stands there twice`},
		{`{"window":`, `{"window": {"type": "bool"}, "window":`, `field "window" stands there twice`},
		{`"help": "h"`, `"help": {"a": {"b": 1}}`, "help"},
		{`"name": "lru"`, "\"name\": \"lr\xff\"", "not UTF-8"},
		{`"name": "lru"`, `"name": "l\u001b[2Jru"`, "may not have"},
		{`"name": "lru"`, `"name": "l ru"`, "may not have"},
		{`"name": "lru"`, `"name": "../../etc/passwd"`, "may not have"},
		{`["hits"]`, strings.Repeat("[", 30_000) + strings.Repeat("]", 30_000), "manifest"},
		{`"memory_pages": 64`, `"memory_pages": 1e300`, "memory_pages"},
		{`"name": "lru"`, `"name": "` + strings.Repeat("n", 1<<20) + `"`, "at most 65536"},
		{`"name": "lru"`, `"name": "` + strings.Repeat("n", 65) + `"`, "a name of 65 bytes, at most 64"},
		{`"description": "d"`, `"description": "` + strings.Repeat("d", 1025) + `"`, "a description of 1025 bytes"},
		{`"description": "d"`, `"description": "two\nlines"`, "may not have"},
		{`{"window":`, `{"win=dow":`, "may not have"},
		{`"0.1"` + "\n}", `"0.1"` + "\n} x", "after the object"},
		{`"0.1"` + "\n}", `"0.1"`, "manifest"},
	} {
		text := strings.Replace(goodManifest, c.old, c.new, 1)
		if text == goodManifest {
			t.Fatalf("%q is not in the manifest", c.old)
		}
		if _, err := ParseManifest([]byte(text)); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("parsing a manifest with %s: got %v, want %q", c.new, err, c.says)
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
		testenv.OK(t, err)
		n, err := ParseManifest(again)
		if err != nil {
			t.Fatalf("parsing the marshalled manifest %s: %v", again, err)
		}
		if twice, _ := json.Marshal(n); string(twice) != string(again) {
			t.Errorf("%s became %s", again, twice)
		}
	})
}
