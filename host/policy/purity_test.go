package policy

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Instructions of guests that remember.
func store32At(addr int32, value []byte) []byte { return bodyOf(i32(addr), value, []byte{0x36, 2, 0}) }

const (
	add = 0x6a
	and = 0x71
	eq  = 0x46
)

// oneLetter is a place module whose only path is the letter that the code computes.
func oneLetter(code ...[]byte) assembly {
	const result = 4096 + 3<<14
	body := bodyOf(store32(result, -1), store32(result+4, 16), store32(result+8, 1), store32At(result+16, bodyOf(code...)), packed(0, 1))
	a := minimal(abi.RolePlace).with(abi.ExportPlace, "ii>I", body).
		with(abi.ExportBuffer, "ii>i", []byte{0x20, 1}, i32(2000), []byte{0x4b, 0x04, 0x40}, i32(0), []byte{0x0f, 0x0b}, // if len > 2000 { return 0 }
			[]byte{0x20, 0}, i32(14), []byte{0x74}, i32(4096), []byte{add})
	return a
}

func namedPlace(t *testing.T, m *Module) *Place {
	t.Helper()
	p := newPlace(t, m)
	if err := p.Namespace(0, "model=a\n"); err != nil {
		t.Fatal(err)
	}
	return p
}

// A policy that gives one piece two names is found out while it names, whether it counts its calls or remembers what it
// was asked, and is asked no more: what it would say of its files is worth nothing.
func TestImpurePolicyIsDisqualified(t *testing.T) {
	count := bodyOf(store32At(1024, bodyOf(load32(1024), i32(1), []byte{add})), load32(1024))
	for name, c := range map[string]struct {
		letter []byte
		most   int // paths that it gives
	}{
		"counts calls":        {bodyOf(count, i32(1), []byte{and}, i32('a'), []byte{add}), 1},
		"remembers its first": {bodyOf(count, i32(70), []byte{0x4f}, i32('a'), []byte{add}), 3 * verifyEvery}, // calls >= 70: the other guest is newer
	} {
		for _, batch := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				m := open(t, oneLetter(c.letter), Options{})
				p := namedPlace(t, m)
				q := abi.PlaceQuery{KeyLen: 8}
				var err error
				var n int
				for ; n < 4*verifyEvery && err == nil; n++ {
					if batch {
						var list PathList
						err = p.Paths([]abi.PlaceQuery{q}, &list)
					} else {
						_, _, err = p.Path(&q, nil)
					}
				}
				if !errors.Is(err, ErrImpure) || n > c.most {
					t.Fatalf("after %d paths: %v", n, err)
				}
				if !p.Quarantined() || !p.Down() || !errors.Is(m.Quarantined(), ErrImpure) || p.Stats().Faults == 0 {
					t.Errorf("quarantined %v, down %v: %v", p.Quarantined(), p.Down(), m.Quarantined())
				}
				if _, _, err := p.Path(&q, nil); !errors.Is(err, ErrQuarantine) {
					t.Errorf("it is still asked: %v", err)
				}
				if _, err := p.Identity([]byte("a")); !errors.Is(err, ErrQuarantine) {
					t.Errorf("it is still asked: %v", err)
				}
			})
		}
	}
	p := namedPlace(t, open(t, oneLetter(i32('a')), Options{}))
	for range 10 * verifyEvery {
		if path, _, err := p.Path(&abi.PlaceQuery{KeyLen: 8}, nil); err != nil || string(path) != "a" {
			t.Fatalf("a pure policy: %q, %v", path, err)
		}
	}
	if err := p.Verify(&abi.PlaceQuery{KeyLen: 8}, []byte("a")); err != nil {
		t.Error(err)
	}
	if err := p.Verify(&abi.PlaceQuery{KeyLen: 8}, []byte("b")); !errors.Is(err, ErrImpure) || !p.Down() {
		t.Errorf("a name that it gave before: %v", err)
	}
}

// A namespace that a module cannot bear costs it that namespace, not all others.
func TestRefusedNamespaceIsNotToldAgain(t *testing.T) {
	a := oneLetter(i32('a')).with(abi.ExportNamespace, "ii>i", []byte{0x20, 0}, i32(7), []byte{eq, 0x04, 0x40, 0x00, 0x0b}, i32(0)) // id == 7: unreachable
	m := open(t, a, Options{})
	synctest.Test(t, func(t *testing.T) {
		p, err := m.NewPlace(t.Context(), PlaceOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		for id := range uint32(10) {
			if err := p.Namespace(id, "x\n"); (err != nil) != (id == 7) {
				t.Errorf("namespace %d: %v", id, err)
			}
			time.Sleep(time.Second) // until the next guest may start
		}
		for id := range uint32(10) {
			path, _, err := p.Path(&abi.PlaceQuery{Namespace: id, KeyLen: 8}, nil)
			if (err != nil) != (id == 7) || err == nil && string(path) != "a" {
				t.Errorf("namespace %d: %q, %v", id, path, err)
			}
		}
		if err := m.Quarantined(); err != nil || p.Stats().Faults != 1 {
			t.Errorf("%d faults, %v", p.Stats().Faults, err)
		}
	})
}

// Names that cannot be right count as faults.
func TestMisnamedPiecesAreFaults(t *testing.T) {
	m := open(t, oneLetter(i32('a')), Options{})
	p := namedPlace(t, m)
	for n := range maxFaults {
		if p.Quarantined() {
			t.Errorf("in quarantine after %d faults", n)
		}
		p.Misnamed(errors.New("another piece has the name"))
	}
	if !p.Quarantined() || !errors.Is(m.Quarantined(), ErrQuarantine) || p.Stats().Faults != maxFaults {
		t.Errorf("%v, %d faults", m.Quarantined(), p.Stats().Faults)
	}
	if path, _, err := p.Path(&abi.PlaceQuery{KeyLen: 8}, nil); err != nil || string(path) != "a" {
		t.Errorf("the names of files that are there: %q, %v", path, err)
	}
}
