package abi

import (
	"bytes"
	"encoding/json"
	"slices"
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

// A request's end stands among events: where its fields are in one is published.
func TestRequestEndIsAnEvent(t *testing.T) {
	h := Hints{Reason: EndToolCall, TokensIn: 7000, TokensOut: 52, Priority: -3, ReturnMS: 1500}
	e := NewRequestEnd(9, 4, h, 77)
	if e.Op != OpRequestEnd || e.Slot != None || e.Request != 9 || e.Tenant != 4 || e.Time != 77 {
		t.Errorf("the event of a request's end is %+v", e)
	}
	want := RequestEnd{
		Slot: None, ReturnMS: 1500, Priority: -3, TokensIn: 7000, TokensOut: 52, Request: 9, Tenant: 4,
		Op: OpRequestEnd, Reason: EndToolCall, Time: 77,
	}
	if got := *e.RequestEnd(); got != want {
		t.Errorf("the request's end reads as %+v, want %+v", got, want)
	}
}

func TestParseEndReason(t *testing.T) {
	for r := EndUnknown; r <= EndAbort; r++ {
		if got := ParseEndReason(r.String()); got != r {
			t.Errorf("%q parses as %v", r.String(), got)
		}
	}
	if got := ParseEndReason("weather"); got != EndUnknown {
		t.Errorf("an unknown reason parses as %v", got)
	}
	if got := EndReason(99).String(); got != "unknown" {
		t.Errorf("reason 99 prints as %q, want unknown", got)
	}
}

func TestRuns(t *testing.T) {
	for _, c := range []struct{ least, host, says string }{
		{"", "0.1", ""}, {"0.1", "0.1", ""}, {"0.1.0", "0.1", ""}, {"0.1", "0.2", ""}, {"0.9", "0.10", ""}, {"0.9.9", "1", ""}, {Release, Release, ""},
		{"0.1.1", "0.1", "release 0.1.1"}, {"0.10", "0.9", "release 0.10"}, {"2", "1.9.9", "release 2"},
		{"v1", "1", "numbers"}, {"1.2.3.4", "1", "numbers"}, {"1.-2", "1", "numbers"}, {"1.", "1", "numbers"},
	} {
		m := Manifest{Name: "m", MinHost: c.least}
		err := m.Runs(c.host)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q on %q: %v", c.least, c.host, err)
		}
	}
}

func TestCustomSection(t *testing.T) {
	typeSection := []byte{1, 1, 0}
	module := slices.Concat(wasmHeader, []byte{0, 3, 1, 'x', '1'}, typeSection, []byte{0, 3, 1, 'y', '2'}, []byte{0, 3, 1, 'x', '3'})
	if got, ok, err := CustomSection(module, "x"); string(got) != "1" || !ok || err != nil {
		t.Errorf("x: %q, %v, %v", got, ok, err)
	}
	if _, ok, err := CustomSection(module, "z"); ok || err != nil {
		t.Errorf("z: %v, %v", ok, err)
	}
	out, err := WithCustomSection(module, "x", []byte("new"))
	testenv.OK(t, err)
	if want := slices.Concat(wasmHeader, typeSection, []byte{0, 3, 1, 'y', '2'}, []byte{0, 5, 1, 'x', 'n', 'e', 'w'}); !bytes.Equal(out, want) {
		t.Errorf("the module with the section replaced is %q, want %q", out, want)
	}
	again, err := WithCustomSection(out, "x", []byte("new"))
	if err != nil || !bytes.Equal(again, out) {
		t.Errorf("packing twice differs: %q, %v", again, err)
	}
}

func FuzzCustomSection(f *testing.F) {
	for _, s := range []string{"", "\x00asm", "\x00asm\x02\x00\x00\x00", string(wasmHeader) + "\x00", string(wasmHeader) + "\x00\x02\x05x", string(wasmHeader) + "\x00\x03\x01xd"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, module []byte) {
		out, err := WithCustomSection(module, ManifestSection, []byte("data"))
		if err != nil {
			return
		}
		if got, ok, err := CustomSection(out, ManifestSection); string(got) != "data" || !ok || err != nil {
			t.Errorf("reading back the section of %q: got %q, %v, %v", out, got, ok, err)
		}
	})
}
