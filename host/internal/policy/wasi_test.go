package policy

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/tetratelabs/wazero/sys"
)

// A Go guest that panics writes to standard error and exits: the fault carries its words, and so does the log.
func TestStandardErrorAndExit(t *testing.T) {
	a := minimal(abi.RoleEvict).Importing(abi.ImportWASI, "fd_write", "iiii>i").Importing(abi.ImportWASI, "proc_exit", "i>")
	a.Manifest = `{"name":"mine","version":"1","abi":1,"roles":["evict"],"grants":["wasi-stub"]}`
	a = a.With(abi.ExportStep, "ii>I",
		store32(64, 128), store32(68, 5), store32(128, 0x706f6f6c), store32(132, '\n'), // one vector: "loop\n"
		wasmtest.I32(2), wasmtest.I32(64), wasmtest.I32(1), wasmtest.I32(80), wasmtest.Call(0), []byte{0x1a},
		wasmtest.I32(2), wasmtest.Call(1), unreachable)
	var log bytes.Buffer
	m, err := openBytes(t, a.Bytes(), Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	testenv.OK(t, err)
	e := newEvict(t, m, 10)
	_, err = e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1}, make([]uint32, 1))
	var f *Fault
	var exit *sys.ExitError
	if !errors.As(err, &f) || f.Text != "loop" || f.Reason != "exited with code 2" || !errors.As(err, &exit) || f.Module != "mine" {
		t.Errorf("the fault of a guest that exits is %+v", err)
	}
	if !strings.Contains(log.String(), "text=loop") || !strings.Contains(log.String(), "policy=mine") {
		t.Errorf("log: %s", log.String())
	}
}

// Two instances with one seed draw the same lots, whatever other instances do.
func TestSeededRandom(t *testing.T) {
	a := minimal(abi.RoleEvict).Importing(abi.ImportModule, abi.ImportRand, ">I")
	a.Manifest = `{"name":"mine","version":"1","abi":1,"roles":["evict"],"grants":["random"]}`
	result := wasmtest.I32(4096 + 3<<14)
	a = a.With(abi.ExportStep, "ii>I", result, wasmtest.Call(0), []byte{0x42, 0xff, 0x00, 0x83, 0x37, 3, 0}, wasmtest.Packed(0, 1)) // slot = rand & 127
	if _, err := openBytes(t, a.Bytes(), Options{}); !errors.Is(err, ErrGrant) {
		t.Fatalf("random numbers without a grant: got %v, want %v", err, ErrGrant)
	}
	m, err := openBytes(t, a.Bytes(), Options{Grants: []string{abi.GrantRandom}})
	testenv.OK(t, err)
	draw := func(seed uint64) (out [8]uint32) {
		e, err := m.NewEvict(t.Context(), EvictOptions{MaxSlots: 128, Seed: seed})
		testenv.OK(t, err)
		defer e.Close()
		for i := range out {
			if _, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1}, out[i:i+1]); err != nil {
				t.Fatal(err)
			}
		}
		return out
	}
	first, again, other := draw(1), draw(1), draw(2)
	if first != again || first == other {
		t.Errorf("seed 1 draws %v and then %v, seed 2 %v", first, again, other)
	}
}
