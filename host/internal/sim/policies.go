package sim

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// Policy is something to simulate: a module with its settings, or a baseline.
type Policy struct {
	Text   string // as written
	Label  string // short, for tables
	Role   abi.Role
	module *policy.Module
	config policy.Config
}

// OpenPolicy parses "name", "path/to.wasm", "belady" or "infinite", with settings after a colon:
// "s3fifo.wasm:small=20,moveat=1". A module evicts.
func OpenPolicy(ctx context.Context, text string, opt policy.Options) (*Policy, error) {
	if text == Belady || text == Infinite {
		return &Policy{Text: text, Label: text}, nil
	}
	return open(ctx, text, opt, abi.RoleEvict)
}

// open opens a module, which plays the first of the roles that it has.
func open(ctx context.Context, text string, opt policy.Options, roles ...abi.Role) (*Policy, error) {
	name, config, err := settings(text)
	if err != nil {
		return nil, err
	}
	p := &Policy{Text: text, Label: label(name, config, text), config: config}
	if p.module, err = policy.Open(ctx, name, opt); err != nil {
		return nil, err
	}
	for _, p.Role = range roles {
		if p.module.Has(p.Role) {
			return p, nil
		}
	}
	does := strings.ReplaceAll(strings.Trim(fmt.Sprint(roles), "[]"), " ", " or ")
	return nil, errors.Join(fmt.Errorf("%w: %s does not %s", policy.ErrRole, name, does), p.Close(ctx))
}

// label is the name of a policy with its settings, for tables.
func label(name string, config policy.Config, text string) string {
	short := strings.TrimSuffix(filepath.Base(name), ".wasm")
	if len(config) > 0 {
		short += " " + text[strings.LastIndexByte(text, ':')+1:]
	}
	return short
}

// settings splits "name:key=value,key=value". A colon without a '=' after it belongs to the name.
func settings(text string) (name string, config policy.Config, err error) {
	at := strings.LastIndexByte(text, ':')
	if at < 0 || !strings.Contains(text[at:], "=") {
		return text, nil, nil
	}
	config = policy.Config{}
	for part := range strings.SplitSeq(text[at+1:], ",") {
		key, value, ok := strings.Cut(part, "=")
		if !ok || key == "" {
			return "", nil, fmt.Errorf("%w: %q: want settings as key=value, separated by commas", ErrPolicy, text)
		}
		config[key] = value
	}
	return text[:at], config, nil
}

// Close releases the module.
func (p *Policy) Close(ctx context.Context) error {
	if p.module == nil {
		return nil
	}
	return p.module.Close(ctx)
}

// run is one cell of the table.
func (p *Policy) run(ctx context.Context, w *Workload, capacity int, o Options) (r Result, err error) {
	switch {
	case p.module != nil:
		r, err = w.Run(ctx, p.module, p.config, capacity, o)
	case p.Text == Belady:
		r, err = w.RunBelady(ctx, capacity, o)
	default:
		r, err = w.RunInfinite(ctx, o)
		r.Capacity = capacity
	}
	r.Policy = p.Text
	return r, err
}
