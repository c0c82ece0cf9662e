package config

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/policy/compiler"
)

// Tools that read no configuration compile with the same limits.
func TestCompileDefaults(t *testing.T) {
	want := PolicyCompile{compiler.DefaultMemory, compiler.DefaultCPU, compiler.DefaultTime}
	if got := Default().PolicyCompile; got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
