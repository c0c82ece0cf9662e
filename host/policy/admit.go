package policy

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// AdmitOptions bind an admission policy.
type AdmitOptions struct {
	Capacity      uint64 // bytes behind it, over all roots
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
	State         State  // of an earlier instance, to go on from
}

// Admit decides which entries are stored at all. It is safe for concurrent use; calls take turns. While a module is down
// after a fault, everything is admitted.
type Admit struct {
	m        *Module
	settings settings
	meter    meter
	revival  *revival

	mu    sync.Mutex
	known []namespace    // in the order they were announced
	guest guest.Admitter // native
	in    *instance      // wasm; nil while it is down
	admit export
	err   error

	loaded bool
}

// NewAdmit makes an instance.
func (m *Module) NewAdmit(ctx context.Context, o AdmitOptions) (*Admit, error) {
	s := settings{role: abi.RoleAdmit, capacity: o.Capacity, seed: o.Seed, config: o.Config, namespaces: o.MaxNamespaces}
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	a := &Admit{m: m, settings: s, revival: newRevival(m, abi.RoleAdmit)}
	var err error
	if m.code == nil {
		if a.guest, err = native[guest.Admitter](m, &s); err != nil {
			return nil, err
		}
		a.loaded = m.takes(&o.State, 0) && m.loadNative(a.guest, &o.State)
		return a, nil
	}
	if a.in, err = a.start(ctx, &a.meter); err != nil {
		return nil, err
	}
	if m.takes(&o.State, 0) {
		if err := a.load(ctx, &o.State); err != nil {
			a.in.close()
			return nil, err
		}
	}
	a.admit = a.in.export(abi.ExportAdmit)
	return a, nil
}

// load puts an instance that took the state over in the place of the empty one.
func (a *Admit) load(ctx context.Context, s *State) error {
	var trial meter
	in, err := a.start(ctx, &trial)
	if err != nil {
		return err
	}
	if a.loaded, err = in.load(s.Data, 0); err != nil {
		a.m.unread(err)
	}
	if !a.loaded {
		in.close()
		return nil
	}
	a.in.close()
	a.in, in.meter = in, &a.meter
	return nil
}

func (a *Admit) start(ctx context.Context, t *meter) (*instance, error) {
	in, err := a.m.instantiate(ctx, &a.settings, t)
	if err != nil {
		return nil, err
	}
	err = in.buffer(abi.BufferArgs, batchSize*abi.CandidateSize)
	if err == nil {
		err = in.buffer(abi.BufferResult, batchSize)
	}
	if err != nil {
		in.close()
		return nil, err
	}
	return in, nil
}

// restart puts a new instance, which is told all namespaces, in the place of one that failed.
func (a *Admit) restart(ctx context.Context) error {
	in, err := a.start(ctx, &a.meter)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range a.known {
		if err == nil {
			err = in.namespace(n.id, n.text)
		}
	}
	if err != nil || a.err != nil {
		in.close()
		return err
	}
	a.in, a.admit = in, in.export(abi.ExportAdmit)
	a.meter.builtin.Store(false)
	return nil
}

// fell lets go of an instance that failed. The error is nil when the built-in policy answers in its place.
func (a *Admit) fell(err error) error {
	a.in.close()
	a.in = nil
	if a.revival.failed(err, a.restart) == Halt {
		a.err = err
		return err
	}
	a.meter.builtin.Store(true)
	return nil
}

// Namespace tells the policy a namespace's text, before any candidate that names its id.
func (a *Admit) Namespace(id uint32, text string) error {
	if err := checkNamespace(a.m, id, a.settings.namespaces, text); err != nil {
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
	a.known = append(a.known, namespace{id, text})
	if a.in == nil {
		return nil
	}
	if err := a.in.namespace(id, text); err != nil {
		return a.fell(err)
	}
	return nil
}

// Admit writes one answer per candidate. dst is at least as long as the batch.
func (a *Admit) Admit(batch []abi.Candidate, dst []bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(batch) > 0 && a.err == nil {
		n := min(len(batch), batchSize)
		switch {
		case a.guest != nil:
			start := a.meter.begin(n)
			a.guest.Admit(batch[:n], dst[:n])
			a.meter.done(start)
		case a.in == nil:
			admitAll{}.Admit(batch[:n], dst[:n])
		default:
			if err := a.ask(batch[:n], dst[:n]); err != nil {
				admitAll{}.Admit(batch[:n], dst[:n])
				_ = a.fell(err)
			}
		}
		batch, dst = batch[n:], dst[n:]
	}
	return a.err
}

// ask makes one crossing. The host's default is to admit.
func (a *Admit) ask(batch []abi.Candidate, dst []bool) error {
	n := uint32(len(batch))
	args, err := records[abi.Candidate](a.in, abi.BufferArgs, n)
	if err != nil {
		return err
	}
	copy(args, batch)
	a.in.now = batch[n-1].Time
	got, ok, err := a.in.count(&a.admit, uint64(n), abi.CandidateSize, int(n), a.m.code.fuel.of(int(n)))
	if err != nil {
		return err
	}
	if !ok {
		admitAll{}.Admit(batch, dst)
		return nil
	}
	if got != n {
		return a.in.fault(a.admit.name, fmt.Sprintf("gave %d answers to %d candidates", got, n), nil)
	}
	answers, err := a.in.view(abi.BufferResult, n)
	if err != nil {
		return err
	}
	for i, answer := range answers {
		if answer > 1 {
			return a.in.fault(a.admit.name, fmt.Sprintf("answered %d for candidate %d, want 0 or 1", answer, i), nil)
		}
		dst[i] = answer == 1
	}
	return nil
}

// Close ends the policy.
func (a *Admit) Close() error {
	a.mu.Lock()
	if a.in != nil {
		a.in.close()
	}
	a.err = ErrClosed
	a.mu.Unlock()
	a.revival.close()
	return nil
}

// Stats may be called at any time.
func (a *Admit) Stats() Stats { return a.meter.stats(a.m, abi.RoleAdmit) }

func checkNamespace(m *Module, id, limit uint32, text string) error {
	if id >= limit {
		return fmt.Errorf("%w: %s: id %d, ids are below %d", ErrNamespace, m.name, id, limit)
	}
	if len(text) > maxNamespaceText {
		return fmt.Errorf("%w: %s: a text of %d bytes, at most %d", ErrNamespace, m.name, len(text), maxNamespaceText)
	}
	return nil
}
