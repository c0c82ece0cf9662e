package gds

import (
	"os"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

// TestSetDefault asks C for the variable, as a driver does.
func TestSetDefault(t *testing.T) {
	const name = "KVHOST_TEST_SET_DEFAULT"
	t.Cleanup(func() { os.Unsetenv(name) })
	getenv, err := purego.Dlsym(purego.RTLD_DEFAULT, "getenv")
	testenv.OK(t, err)
	for _, value := range []string{"32", "8"} { // the second finds it set
		testenv.OK(t, SetDefault(name, value))
		key := append([]byte(name), 0)
		at, _, _ := purego.SyscallN(getenv, uintptr(unsafe.Pointer(&key[0])))
		if at == 0 {
			t.Fatal("C does not have it")
		}
		if got := unix.BytePtrToString(*(**byte)(unsafe.Pointer(&at))); got != "32" || os.Getenv(name) != "32" {
			t.Errorf("after %s: C has %q, Go %q, want 32", value, got, os.Getenv(name))
		}
	}
}
