package policy

import (
	"context"
	"fmt"
)

// code is a module's compiled form.
type code struct{}

func (c *code) close(context.Context) error { return nil }

// Open loads a module: a path to a .wasm file, or the name of an embedded policy with or without ".wasm".
func Open(ctx context.Context, name string, opt Options) (*Module, error) {
	return nil, fmt.Errorf("%w: %s", ErrNotFound, name)
}

func (e *Evict) bad(format string, args ...any) error {
	e.meter.faults.Add(1)
	return &Fault{Module: e.m.name, Export: "kv_step", Reason: fmt.Sprintf(format, args...)}
}
