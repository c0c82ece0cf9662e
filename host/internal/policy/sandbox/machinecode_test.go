package sandbox

import (
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"github.com/tetratelabs/wazero"

	"github.com/kvhost/kvhost/abi/testenv"
)

// What opens the same module with one cache at the same time has its machine code once, for as long as one of them has it.
func TestMachineCodeIsShared(t *testing.T) {
	cache, err := OpenCache(filepath.Join(t.TempDir(), "c"))
	testenv.OK(t, err)
	compile := func(code ...byte) *Code {
		t.Helper()
		c, err := Compile(t.Context(), sourceOf(t, cache, code...))
		testenv.OK(t, err)
		return c
	}
	first, second, other := compile(0x01), compile(0x01), compile(0x01, 0x01)
	if first.machineCode != second.machineCode {
		t.Error("the same module was loaded twice")
	}
	if other.machineCode == first.machineCode {
		t.Error("two modules share their machine code")
	}
	testenv.OK(t, first.Close(t.Context()))
	if third := compile(0x01); third.machineCode != second.machineCode {
		t.Error("code in use was loaded again")
	} else if err := third.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := second.runtime.InstantiateModule(t.Context(), second.compiled, wazero.NewModuleConfig().WithName("")); err != nil {
		t.Errorf("code that one still has: %v", err)
	}
	testenv.OK(t, errors.Join(second.Close(t.Context()), other.Close(t.Context())))
	if len(cache.inUse) != 0 {
		t.Errorf("%d modules are still loaded", len(cache.inUse))
	}
}

func TestMachineCodeIsSharedConcurrently(t *testing.T) {
	cache, err := OpenCache(filepath.Join(t.TempDir(), "c"))
	testenv.OK(t, err)
	src := sourceOf(t, cache, 0x01)
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for range 20 {
				c, err := Compile(t.Context(), src)
				if err != nil {
					t.Error(err)
					return
				}
				mod, err := c.runtime.InstantiateModule(t.Context(), c.compiled, wazero.NewModuleConfig().WithName(""))
				if err == nil {
					err = mod.Close(t.Context())
				}
				if err = errors.Join(err, c.Close(t.Context())); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	if len(cache.inUse) != 0 {
		t.Errorf("%d modules are still loaded", len(cache.inUse))
	}
}
