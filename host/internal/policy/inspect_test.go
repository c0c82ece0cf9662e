package policy

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	metering "github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

func inspect(t *testing.T, b []byte, opt Options) *Inspection {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.wasm")
	testenv.OK(t, os.WriteFile(path, b, 0o600))
	i, err := Inspect(t.Context(), path, opt)
	testenv.OK(t, err)
	if i.Path != path || i.Digest != digestOf(b) || i.Bytes != len(b) {
		t.Errorf("the inspection of %s is %+v", path, i)
	}
	return i
}

func TestInspect(t *testing.T) {
	a := keeper(abi.RoleEvict, "k/1").Importing(abi.ImportModule, abi.ImportNow, ">I").Importing(abi.ImportModule, abi.ImportFail, "ii>").Importing("env", "x", ">")
	a.Manifest = `{"name":"mine","version":"1","abi":1,"roles":["evict"],"grants":["clock"],"state_format":"k/1","memory_pages":7,"fuel":{"call":1000000,"record":2}}`
	i := inspect(t, a.Bytes(), Options{Grants: []string{"clock"}})
	if i.Name != "mine" || i.Manifest == nil || i.StateFormat != "k/1" || !reflect.DeepEqual(i.Roles, []abi.Role{abi.RoleEvict}) ||
		i.MemoryPages != 2 || i.MostPages != 7 || i.Fuel != (sandbox.Fuel{Call: 1_500_000, Record: 2_000, Time: 3 * time.Millisecond}) || i.Batch == 0 {
		t.Errorf("the inspection of the keeper is %+v", i)
	}
	want := []sandbox.Import{
		{Module: abi.ImportModule, Name: abi.ImportNow, Type: "() -> i64", Grant: abi.GrantClock, Known: true},
		{Module: abi.ImportModule, Name: abi.ImportFail, Type: "(i32, i32)", Known: true}, {Module: "env", Name: "x", Type: "()"},
	}
	if !reflect.DeepEqual(i.Imports, want) || !reflect.DeepEqual(i.Grants(), []string{abi.GrantClock}) {
		t.Errorf("its imports are %+v, want %+v", i.Imports, want)
	}
	if !errors.Is(i.Refused, ErrBadModule) {
		t.Errorf("an unknown import: %v", i.Refused)
	}
	for _, c := range i.Counts {
		if c.What == "functions" && c.Got != uint64(len(a.Funcs)+len(a.Imports)) || c.Most == 0 {
			t.Errorf("a count is %+v", c)
		}
	}
	if i := inspect(t, minimal(abi.RoleLayout).Bytes(), Options{}); i.Refused != nil || i.Manifest != nil || i.Name != "m" {
		t.Errorf("the inspection of a module without a manifest is %+v", i)
	}
	if i := inspect(t, []byte("no module"), Options{}); !errors.Is(i.Refused, ErrBadModule) {
		t.Errorf("the inspection of text is %+v, want %v", i, ErrBadModule)
	}
	if i := inspect(t, a.Bytes(), Options{SHA256: "ab"}); !errors.Is(i.Refused, ErrDigest) || i.Name != "mine" {
		t.Errorf("the inspection with another digest is %+v, want %v", i, ErrDigest)
	}
	if i := inspect(t, minimal(abi.RoleEvict).With(metering.Global, ">").Bytes(), Options{}); !errors.Is(i.Refused, metering.ErrReserved) {
		t.Errorf("the inspection of a reserved export is %+v, want %v", i, metering.ErrReserved)
	}
	if i, err := Inspect(t.Context(), "lru", Options{Dir: distDir}); err != nil || i.Refused != nil || i.Digest != modules["lru"].Digest() {
		t.Errorf("the inspection of lru is %+v, %v", i, err)
	}
}
