package policy

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// AdmitOptions bind an admission policy.
type AdmitOptions struct {
	Capacity      uint64 // bytes behind it, over all roots
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
	State         State  // of an earlier instance
}

// Admit decides which entries are stored at all, and which move to another level. It is safe for concurrent use; calls are
// serialised. While a module is down after a fault, [AdmitsByDefault] answers.
type Admit struct {
	m        *Module
	settings settings
	usage    sandbox.Usage
	restarts *restarter

	mu    sync.Mutex
	known []namespace       // in the order they were announced
	guest guest.Admitter    // native
	in    *sandbox.Instance // wasm; nil while it is down
	admit sandbox.Export
	err   error

	loaded bool
}

// NewAdmit starts an instance, from o.State if it can use that.
func (m *Module) NewAdmit(ctx context.Context, o AdmitOptions) (*Admit, error) {
	a, err := m.newAdmit(ctx, o)
	if err != nil || !m.acceptsState(&o.State, 0) {
		return a, err
	}
	if a.in == nil {
		a.loaded = m.loadNative(a.guest, &o.State)
		return a, nil
	}
	if a.loaded, err = a.in.Load(o.State.Data, 0); err != nil {
		m.logUnusable(err)
		a.in.Close()
		return m.newAdmit(ctx, o) // nothing of the failed attempt remains, not even its fault count
	}
	return a, nil
}

func (m *Module) newAdmit(ctx context.Context, o AdmitOptions) (*Admit, error) {
	s := settings{role: abi.RoleAdmit, config: o.Config}
	s.Capacity, s.Seed, s.MaxNamespaces = o.Capacity, o.Seed, o.MaxNamespaces
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	a := &Admit{m: m, settings: s, restarts: newRestarter(m, abi.RoleAdmit)}
	var err error
	if m.code == nil {
		a.guest, err = native[guest.Admitter](m, &s)
	} else if a.in, err = a.start(ctx); err == nil {
		a.admit = a.in.Export(abi.ExportAdmit)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

func (a *Admit) start(ctx context.Context) (*sandbox.Instance, error) {
	in, err := a.m.instantiate(ctx, &a.settings, &a.usage)
	if err != nil {
		return nil, err
	}
	err = in.RequireBuffer(abi.BufferArgs, sandbox.MaxBatch*abi.CandidateSize)
	if err == nil {
		err = in.RequireBuffer(abi.BufferResult, sandbox.MaxBatch)
	}
	if err != nil {
		in.Close()
		return nil, err
	}
	return in, nil
}

// restart replaces a failed instance by a new one, which is told all namespaces.
func (a *Admit) restart(ctx context.Context) error {
	in, err := a.start(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range a.known {
		if err == nil {
			err = in.Namespace(n.id, n.text)
		}
	}
	if err != nil || a.err != nil {
		in.Close()
		return err
	}
	a.in, a.admit = in, in.Export(abi.ExportAdmit)
	a.usage.Builtin.Store(false)
	return nil
}

// failed drops an instance that failed. The error is nil when the built-in policy answers in its place.
func (a *Admit) failed(err error) error {
	a.in.Close()
	a.in = nil
	if a.restarts.failed(err, a.restart) == Halt {
		a.err = err
		return err
	}
	a.usage.Builtin.Store(true)
	return nil
}

// Namespace tells the policy a namespace's text, before any candidate that names its id.
func (a *Admit) Namespace(id uint32, text string) error {
	if err := checkNamespace(a.m, id, a.settings.MaxNamespaces, text); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		return a.err
	}
	if a.m.code == nil {
		if n, ok := a.guest.(guest.Namespacer); ok {
			n.Namespace(id, text)
		}
		return nil
	}
	if slices.ContainsFunc(a.known, func(n namespace) bool { return n.id == id && n.text == text }) {
		return nil // it was bound to this policy before
	}
	a.known = append(a.known, namespace{id: id, text: text})
	if a.in == nil {
		return nil
	}
	if err := a.in.Namespace(id, text); err != nil {
		return a.failed(err)
	}
	return nil
}

// Admit writes one answer per candidate. dst is at least as long as the batch.
func (a *Admit) Admit(batch []abi.Candidate, dst []bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(batch) > 0 && a.err == nil {
		n := min(len(batch), sandbox.MaxBatch)
		switch {
		case a.guest != nil:
			start := a.usage.Begin(n)
			a.guest.Admit(batch[:n], dst[:n])
			a.usage.End(start)
		case a.in == nil:
			admitDefault{}.Admit(batch[:n], dst[:n])
		default:
			if err := a.ask(batch[:n], dst[:n]); err != nil {
				admitDefault{}.Admit(batch[:n], dst[:n])
				_ = a.failed(err)
			}
		}
		batch, dst = batch[n:], dst[n:]
	}
	return a.err
}

// ask calls the guest once. It may leave the call to [AdmitsByDefault].
func (a *Admit) ask(batch []abi.Candidate, dst []bool) error {
	n := uint32(len(batch))
	args, err := sandbox.Records[abi.Candidate](a.in, abi.BufferArgs, n)
	if err != nil {
		return err
	}
	copy(args, batch)
	a.in.SetNow(batch[n-1].Time)
	got, ok, err := a.in.Count(&a.admit, uint64(n), abi.CandidateSize, int(n), a.m.code.Limits().For(int(n)))
	if err != nil {
		return err
	}
	if !ok {
		admitDefault{}.Admit(batch, dst)
		return nil
	}
	if got != n {
		return a.in.Fault(a.admit.Name, fmt.Sprintf("gave %d answers to %d candidates", got, n), nil)
	}
	answers, err := a.in.View(abi.BufferResult, n)
	if err != nil {
		return err
	}
	for i, answer := range answers {
		if answer > 1 {
			return a.in.Fault(a.admit.Name, fmt.Sprintf("answered %d for candidate %d, want 0 or 1", answer, i), nil)
		}
		dst[i] = answer == 1
	}
	return nil
}

// Close ends the policy.
func (a *Admit) Close() error {
	a.mu.Lock()
	if a.in != nil {
		a.in.Close()
	}
	a.err = ErrClosed
	a.mu.Unlock()
	a.restarts.close()
	return nil
}

// Stats may be called at any time.
func (a *Admit) Stats() Stats { return stats(&a.usage, a.m, abi.RoleAdmit) }

func checkNamespace(m *Module, id, limit uint32, text string) error {
	if id >= limit {
		return fmt.Errorf("%w: %s: id %d, ids are below %d", ErrNamespace, m.name, id, limit)
	}
	if len(text) > maxNamespaceText {
		return fmt.Errorf("%w: %s: text has %d bytes, at most %d", ErrNamespace, m.name, len(text), maxNamespaceText)
	}
	return nil
}
