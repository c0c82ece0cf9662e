package policy

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// mortal is a module with all roles whose calls trap when a candidate's, query's or plane's first word is 13.
func mortal() wasmtest.Assembly {
	word := wasmtest.Join(wasmtest.I32(4096+2<<14), []byte{0x28, 2, 0}, wasmtest.I32(13), []byte{0x46, 0x04, 0x40, 0x00, 0x0b}) // if load(ARGS) == 13 { unreachable }
	a := minimal(abi.RoleAdmit).
		With(abi.ExportAdmit, "ii>I", word, []byte{0x20, 0, 0xad}).
		With(abi.ExportPlace, "ii>I", word, wasmtest.Packed(abi.StatusDefault, 0)).
		With(abi.ExportLayout, "ii>I", word, wasmtest.Packed(abi.StatusDefault, 0)).
		With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(14), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a})
	a.Pages = 40
	return a
}

func TestAdmitComesBack(t *testing.T) {
	m := open(t, mortal(), Options{})
	synctest.Test(t, func(t *testing.T) {
		ad, err := m.NewAdmit(t.Context(), AdmitOptions{})
		testenv.OK(t, err)
		defer ad.Close()
		ask := func(key uint64) (bool, bool) {
			dst := []bool{false}
			testenv.OK(t, ad.Admit([]abi.Candidate{{Key: key}}, dst))
			return dst[0], ad.Stats().Builtin
		}
		if yes, builtin := ask(1); yes || builtin { // the guest's own answer is what stands in RESULT: no
			t.Error(yes, builtin)
		}
		if yes, builtin := ask(13); !yes || !builtin {
			t.Error("the built-in policy did not answer at once:", yes, builtin)
		}
		if yes, builtin := ask(1); !yes || !builtin {
			t.Error("the built-in policy does not answer on:", yes, builtin)
		}
		time.Sleep(2 * firstPause)
		synctest.Wait()
		if yes, builtin := ask(1); yes || builtin {
			t.Error("the module did not come back:", yes, builtin)
		}
		for n := 2; n <= maxFaults; n++ {
			if yes, _ := ask(13); !yes {
				t.Error("no answer at fault", n)
			}
			time.Sleep(firstPause << n)
			synctest.Wait()
		}
		if err := m.Quarantined(); !errors.Is(err, ErrQuarantine) || !errors.Is(err, ErrFault) {
			t.Errorf("after %d faults: %v", maxFaults, err)
		}
		time.Sleep(time.Hour)
		if yes, builtin := ask(1); !yes || !builtin {
			t.Error("a module in quarantine answers:", yes, builtin)
		}
		if got := ad.Stats().Faults; got != maxFaults {
			t.Errorf("%d faults", got)
		}
	})
}

func TestFaultsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &Module{name: "m", log: NativeModule("", nil, nil).log, code: &sandbox.Code{}}
		for range 3 * maxFaults {
			if v, pause := m.Failed(abi.RoleEvict, ErrFault); v != Restart || pause != firstPause {
				t.Fatal(v, pause)
			}
			time.Sleep(faultWindow + time.Second)
		}
		for n := range maxFaults {
			v, pause := m.Failed(abi.RoleEvict, ErrFault)
			if last := n == maxFaults-1; last != (v == Quarantine) || !last && pause != firstPause<<n {
				t.Error(n, v, pause)
			}
		}
	})
}

func TestLayoutAndPlaceComeBack(t *testing.T) {
	m := open(t, mortal(), Options{})
	synctest.Test(t, func(t *testing.T) {
		p, err := m.NewPlace(t.Context(), PlaceOptions{})
		testenv.OK(t, err)
		defer p.Close()
		for id := range uint32(20) {
			testenv.OK(t, p.Namespace(id, "x\n"))
		}
		path := func(ns uint32) error {
			_, _, err := p.Path(&abi.PlaceQuery{Namespace: ns, KeyLen: 16}, nil)
			return err
		}
		testenv.NoError(t, path(1))
		if err := path(13); !errors.Is(err, ErrFault) {
			t.Error(err)
		}
		if err := path(13); err != nil || !p.Stats().Builtin {
			t.Error("the built-in name is not used at once:", err)
		}
		time.Sleep(2 * firstPause)
		synctest.Wait()
		if err := path(1); err != nil || p.Stats().Builtin {
			t.Error("the module did not come back:", err)
		}
		for m.Quarantined() == nil {
			if err := path(13); !errors.Is(err, ErrFault) {
				t.Fatal("no guest is started any more:", err)
			}
			time.Sleep(firstPause << maxFaults)
			synctest.Wait()
		}
		time.Sleep(time.Hour)
		if err := path(13); err != nil || !p.Stats().Builtin {
			t.Error("a module in quarantine is asked:", err)
		}
	})
}

func TestStopOnFault(t *testing.T) {
	var why []error
	m := open(t, mortal(), Options{OnFault: Stop, Stop: func(err error) { why = append(why, err) }})
	ad, err := m.NewAdmit(t.Context(), AdmitOptions{})
	testenv.OK(t, err)
	defer ad.Close()
	l, err := m.NewPlace(t.Context(), PlaceOptions{})
	testenv.OK(t, err)
	defer l.Close()
	if err := ad.Admit([]abi.Candidate{{Key: 13}}, make([]bool, 1)); !errors.Is(err, ErrFault) {
		t.Errorf("the call that faults: got %v, want %v", err, ErrFault)
	}
	if err := ad.Admit([]abi.Candidate{{Key: 1}}, make([]bool, 1)); !errors.Is(err, ErrFault) {
		t.Errorf("a call after the fault: got %v, want %v", err, ErrFault)
	}
	if _, _, err := l.Path(&abi.PlaceQuery{Namespace: 13, KeyLen: 8}, nil); !errors.Is(err, ErrFault) {
		t.Errorf("a call of another role after the fault: got %v, want %v", err, ErrFault)
	}
	if len(why) != 1 || !errors.Is(why[0], ErrFault) || !errors.Is(why[0], ErrQuarantine) {
		t.Errorf("told %v", why)
	}
}
