package config

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Tools that read no configuration compile with the same limits.
func TestCompileDefaults(t *testing.T) {
	want := PolicyCompile{sandbox.DefaultMemory, sandbox.DefaultCPU, sandbox.DefaultTime}
	if got := Default().PolicyCompile; got != want {
		t.Errorf("default limits of compiling: got %+v, want %+v", got, want)
	}
}
