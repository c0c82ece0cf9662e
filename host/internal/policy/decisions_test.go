package policy

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// decisions runs a seeded stream, with pins, tenants and sizes, and logs each answer: what a policy decides is part of its version.
func decisions(t *testing.T, m *Module) []byte {
	t.Helper()
	const slots = 300
	e := newEvict(t, m, slots)
	s := newStream(42, slots)
	var b bytes.Buffer
	var dst [16]uint32
	for range 150 {
		for range 1 + s.rng.IntN(20) {
			testenv.OK(t, e.Event(s.next()))
		}
		ask := s.ask()
		n, err := e.Victims(ask, dst[:])
		testenv.OK(t, err)
		fmt.Fprintf(&b, "bytes %d most %d tenant %d: %d\n", ask.Bytes, ask.MaxVictims, int32(ask.Tenant), dst[:n])
		for _, v := range dst[:n] {
			if s.at[v] >= 0 {
				_ = e.Event(s.remove(v))
			}
		}
	}
	return b.Bytes()
}

func TestDecisionsStay(t *testing.T) {
	for name, want := range map[string]string{"lru": "ea353a2fe4807811", "fifo": "fc16bb4c20333d97"} {
		for kind, m := range map[string]*Module{"native": natives[name], "module": modules[name]} {
			if got := fmt.Sprintf("%x", sha256.Sum256(decisions(t, m)))[:16]; got != want {
				t.Errorf("%s, %s: its decisions have the digest %s, want %s: another version?", name, kind, got, want)
			}
		}
	}
}

// The scan reads whatever an operator hands over.
func FuzzScan(f *testing.F) {
	for r := range abi.Roles {
		a := minimal(r).Importing(abi.ImportModule, abi.ImportFail, "ii>")
		a.Manifest = `{"name":"x","version":"1","abi":1,"roles":["evict"]}`
		f.Add(a.Bytes())
	}
	f.Add([]byte("\x00asm\x01\x00\x00\x00\x01\xff\xff\xff\xff\x0f"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := sandbox.ScanModule(b)
		if err != nil {
			return
		}
		if _, err := s.Verify(); err == nil {
			_ = s.CheckGrants(abi.Manifest{}, nil)
		}
		if again, err := sandbox.ScanModule(s.Compilable()); err != nil || len(again.Sections) > 13 {
			t.Errorf("what compilers get cannot be read: %v", err)
		}
	})
}
