package gds

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

func handleOf(t testing.TB, b *Buffer) []byte {
	t.Helper()
	h, err := b.IPCHandle()
	testenv.OK(t, err)
	return h
}

// The real driver refuses to open a handle in the process that made it, so this is the double's; the way between two
// processes is tested with a client of another process.
func TestImportIPC(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	pages := buffer(t, g, 3<<20)
	want := random(3 << 20)
	on(t, g, func(th *Thread) error { return th.Write(pages.Address, want) })
	double.Rules("") // counts from here
	a, err := g.ImportIPC(handleOf(t, pages))
	testenv.OK(t, err)
	b, err := g.ImportIPC(handleOf(t, pages))
	if err != nil || a != b || a.Size != 3<<20 || a.Base == pages.Address {
		t.Fatalf("imports of one handle: got %+v, %+v, %v, want the same", a, b, err)
	}
	if n := double.Calls("cuIpcOpenMemHandle_v2"); n != 1 {
		t.Errorf("the handle was opened %d times", n)
	}
	got := make([]byte, len(want))
	on(t, g, func(th *Thread) error { return th.Read(got, b.Base) })
	if !bytes.Equal(got, want) {
		t.Error("the import holds other bytes")
	}
	for i, m := range []*Import{a, b} {
		testenv.OK(t, m.Close())
		if n := double.Calls("cuIpcCloseMemHandle"); n != i {
			t.Errorf("after %d closes the handle was closed %d times", i+1, n)
		}
	}
}

func TestImportIPCRefusals(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	pages := buffer(t, g, 1<<20)
	good := handleOf(t, pages)
	for name, c := range map[string]struct {
		handle []byte
		rules  string
	}{
		"short":          {good[:63], ""},
		"long":           {append(bytes.Clone(good), 0), ""},
		"empty":          {nil, ""},
		"garbage":        {make([]byte, 64), ""},
		"driver refuses": {good, "cuIpcOpenMemHandle_v2:code=201"},
		"size unknown":   {good, "cuMemGetAddressRange_v2:code=1"},
		"device unknown": {good, "cuPointerGetAttribute:code=1"},
		"another GPU's":  {good, "cuPointerGetAttribute:answer=1"},
	} {
		double.Rules(c.rules)
		if _, err := g.ImportIPC(c.handle); !errors.Is(err, ErrImport) {
			t.Errorf("import of a handle that is %s: got error %v", name, err)
		}
		if opened, closed := double.Calls("cuIpcOpenMemHandle_v2"), double.Calls(
			"cuIpcCloseMemHandle"); closed > opened || (opened-closed) > 1 {
			t.Errorf("%s: opened %d, closed %d", name, opened, closed)
		}
	}
	double.Rules("")
	m, err := g.ImportIPC(good)
	testenv.OK(t, err)
	m.Close()
}
