package gds

import (
	"fmt"
	"os"
	"runtime"

	"github.com/ebitengine/purego"
)

// setenv sets a variable for C code and Go code.
func setenv(name, value string) error {
	if err := os.Setenv(name, value); err != nil {
		return err
	}
	set, err := purego.Dlsym(purego.RTLD_DEFAULT, "setenv")
	if err != nil {
		return fmt.Errorf("%w: setenv: %w", ErrSymbol, err)
	}
	n, v := append([]byte(name), 0), append([]byte(value), 0)
	if r, _, _ := purego.SyscallN(set, startOf(n), startOf(v), 1); int32(r) != 0 {
		return fmt.Errorf("gds: set %s", name)
	}
	runtime.KeepAlive(n)
	runtime.KeepAlive(v)
	return nil
}

// SetDefault is setenv for a variable that is not set.
func SetDefault(name, value string) error {
	if _, set := os.LookupEnv(name); set {
		return nil
	}
	return setenv(name, value)
}
