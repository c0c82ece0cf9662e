package plugintest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// checker is a check of one module in progress.
type checker struct {
	ctx  context.Context
	m    *policy.Module
	o    Options
	r    *Report
	role abi.Role
}

// Check checks the module at path, or the embedded one of that name. It returns an error only if the module cannot be
// read at all.
func Check(ctx context.Context, path string, o Options) (*Report, error) {
	o.Slots = cmp.Or(o.Slots, defaultSlots)
	r := &Report{Path: path, Slots: o.Slots}
	options := o.policy()
	options.SkipSelfTest = true
	if o.Profile {
		options.Profile = &sandbox.Profile{}
		defer func() { r.Profile = options.Profile.Functions() }()
	}
	seen, err := policy.Inspect(ctx, path, options)
	if err != nil {
		return nil, err
	}
	r.Name, r.Digest, r.Roles = seen.Name, seen.Digest, seen.Roles
	m, err := policy.Open(ctx, path, options)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		r.add(&Finding{Where: "module", What: "a host refuses it: " + err.Error(), Do: "see abi/SPEC.md section 2"})
		return r, nil
	}
	defer m.Close(context.WithoutCancel(ctx))
	c := &checker{ctx: ctx, m: m, o: o, r: r}
	c.describe(seen)
	for _, role := range seen.Roles {
		c.role = role
		if !c.start() {
			continue
		}
		switch role {
		case abi.RoleEvict:
			evictChecks{c}.evict()
		case abi.RoleAdmit:
			c.admit()
		case abi.RolePlace:
			placeChecks{c}.place()
		case abi.RoleLayout:
			c.layout()
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return r, nil
}

// policy returns the options to open the module.
func (o *Options) policy() policy.Options {
	out := policy.Options{Grants: o.Grants, Fuel: o.Fuel, Cache: o.Cache}
	if o.Grants == nil {
		out.Grants = []string{abi.GrantClock, abi.GrantMetrics, abi.GrantRandom}
	}
	return out
}

// describe checks the manifest.
func (c *checker) describe(seen *policy.Inspection) {
	if seen.Manifest == nil {
		c.r.add(&Finding{Where: "section " + abi.ManifestSection, What: "there is none", Do: "add it with `kvhost policy pack`"})
		return
	}
	needed := seen.Grants()
	for _, g := range seen.Manifest.Grants {
		if !slices.Contains(needed, g) {
			c.r.add(&Finding{Where: "section " + abi.ManifestSection, What: fmt.Sprintf("it asks for the grant %q, which no "+
				"import needs", g), Do: "take it out"})
		}
	}
}

// start checks that an instance starts, how it handles bad arguments, and its buffers.
func (c *checker) start() bool {
	slots := uint32(100)
	if c.role != abi.RoleEvict {
		slots = 0
	}
	p, err := c.probe(slots, 0)
	if err != nil {
		c.r.add(err)
		return false
	}
	defer p.Close()
	c.r.add(c.oddBuffers(p))
	c.r.add(c.shortInfo())
	return true
}

// probe starts an instance of the role that is checked.
func (c *checker) probe(slots, longer uint32) (*policy.Probe, error) {
	p, err := c.m.Probe(c.ctx, policy.ProbeOptions{
		Role: c.role, MaxSlots: slots, MaxNamespaces: namespaces, Capacity: uint64(slots) << 20, Seed: c.o.Seed, Config: c.o.Config, ExtraStride: longer,
	})
	if err != nil {
		return nil, c.fault(abi.ExportInit, fmt.Sprintf("with max_slots %d", slots), err)
	}
	c.r.spend(abi.ExportInit, int(slots), p.Used, p.Allowed)
	return p, nil
}

// ready starts an instance of the role that is checked, with its buffers, and announces the namespaces.
func (c *checker) ready(longer uint32, buffers map[int]uint32) (*policy.Probe, error) {
	p, err := c.probe(0, longer)
	if err != nil {
		return nil, err
	}
	if err = c.room(p, buffers); err == nil {
		err = c.announce(p)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// room requests the buffers of a role.
func (c *checker) room(p *policy.Probe, sizes map[int]uint32) error {
	for kind, size := range sizes {
		ok, err := p.Buffer(kind, size)
		if err != nil {
			return c.fault(abi.ExportBuffer, fmt.Sprintf("kind %d, %d bytes", kind, size), err)
		}
		if !ok && kind != abi.BufferRoots && kind != abi.BufferState {
			return c.finding(abi.ExportBuffer, fmt.Sprintf("it gives no room of %d bytes for kind %d", size, kind),
				"give what section 5 says is asked for, and raise memory_pages when memory.grow fails")
		}
	}
	return nil
}

// call makes a call that returns a status and a count.
func (c *checker) call(p *policy.Probe, export string, a, b uint64, records int) (abi.Status, uint32, error) {
	r, err := p.Call(export, a, b, records)
	c.r.spend(export, records, p.Used, p.Allowed)
	if err != nil {
		return 0, 0, c.fault(export, fmt.Sprintf("%d records", records), err)
	}
	if export == abi.ExportEvents || export == abi.ExportNamespace || export == abi.ExportLoad ||
		export == abi.ExportInit {
		return abi.Status(int32(uint32(r))), 0, nil
	}
	status, n := abi.Unpack(r)
	return status, n, nil
}

// good makes a call that must succeed; ok is false if the guest leaves the answer to the host.
func (c *checker) good(p *policy.Probe, export string, a, b uint64, records int) (n uint32, ok bool, err error) {
	status, n, err := c.call(p, export, a, b, records)
	if err == nil && status < 0 {
		err = c.finding(export, fmt.Sprintf("it answers status %d to a call that a host makes (%s)", status, said(p)),
			"a negative status costs the instance: keep it for what breaks the contract")
	}
	return n, status == abi.StatusOK, err
}

func said(p *policy.Probe) string {
	if s := p.FailText(); s != "" {
		return fmt.Sprintf("%q", s)
	}
	return "no words: call fail first"
}

func (c *checker) finding(where, what, do string) error {
	return &Finding{Role: c.role.String(), Where: where, What: what, Do: do}
}

// fault returns the finding for a failed call.
func (c *checker) fault(export, when string, err error) error {
	if own, ok := errors.AsType[*Finding](err); ok {
		return own
	}
	f := &policy.Fault{Export: export, Reason: err.Error()}
	errors.As(err, &f)
	what := f.Reason
	if f.Text != "" {
		what += fmt.Sprintf(": %q", f.Text)
	}
	if when != "" {
		what += " (" + when + ")"
	}
	do := "a trap costs the instance: answer a negative status instead, with words by fail"
	switch {
	case errors.Is(err, policy.ErrFuel):
		do = "do less in one call, or say in the manifest's fuel what it takes"
	case errors.Is(err, policy.ErrConfig):
		do = "it must start with the settings it documents, without any, and with max_slots 0 when it has other roles"
	}
	if f.Stack != "" {
		what += "; guest stack: " + f.Stack
	}
	return c.finding(f.Export, what, do)
}
