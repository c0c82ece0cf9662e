package policy

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

type AdmitOptions struct {
	Capacity      uint64 // bytes of all roots behind the policy
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // namespace ids are below this; 0: 1,024
	State         State  // saved by an earlier instance
	Observe       Observer
}

// Admit decides which entries are stored, and which move to another level. It is safe for concurrent use; calls are
// serialised. While a module is down after a fault, [AdmitsByDefault] answers.
type Admit struct {
	role[guest.Admitter]
	observe Observer
	loaded  bool
	allNew  bool
}

// TakesAllNew reports whether this is the built-in policy, which stores every new entry and need not be asked.
func (a *Admit) TakesAllNew() bool { return a.allNew }

// NewAdmit starts an instance, from o.State if the instance can use it.
func (m *Module) NewAdmit(ctx context.Context, o AdmitOptions) (*Admit, error) {
	a, err := m.newAdmit(ctx, o)
	if err != nil || !m.acceptsState(&o.State, 0) {
		return a, err
	}
	if a.native {
		a.loaded = m.loadNative(a.guest, &o.State)
		return a, nil
	}
	if a.loaded, err = a.in.Load(o.State.Data, 0); err != nil {
		m.logUnusable(err)
		a.in.Close()
		return m.newAdmit(ctx, o) // the failed attempt leaves nothing, not even a fault in the count
	}
	return a, nil
}

func (m *Module) newAdmit(ctx context.Context, o AdmitOptions) (*Admit, error) {
	a := &Admit{role: role[guest.Admitter]{m: m, export: abi.ExportAdmit, buffers: map[int]uint32{
		abi.BufferArgs: sandbox.MaxBatch * abi.CandidateSize, abi.BufferResult: sandbox.MaxBatch,
	}}, observe: o.Observe}
	s := &a.settings
	s.role, s.config, s.Capacity, s.Seed, s.MaxNamespaces = abi.RoleAdmit, o.Config, o.Capacity, o.Seed, o.MaxNamespaces
	if err := a.begin(ctx); err != nil {
		return nil, err
	}
	_, a.allNew = any(a.guest).(admitDefault)
	return a, nil
}

// Namespace passes a namespace's text to the policy, before any candidate with its id. The error is nil if the built-in
// policy answers from now on.
func (a *Admit) Namespace(id uint32, text string) error {
	err := a.role.Namespace(id, text)
	if err == nil || errors.Is(err, ErrNamespace) {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// Admit writes one answer per candidate to dst, which is at least as long as the batch.
func (a *Admit) Admit(batch []abi.Candidate, dst []bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(batch) > 0 && a.err == nil {
		n := min(len(batch), sandbox.MaxBatch)
		switch {
		case a.native:
			start := a.usage.Begin(n)
			a.guest.Admit(batch[:n], dst[:n])
			a.usage.End(start)
		case a.in == nil:
			admitDefault{}.Admit(batch[:n], dst[:n])
		case a.observe != nil:
			a.err = a.observed(batch[:n], dst[:n])
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

func (a *Admit) observed(batch []abi.Candidate, dst []bool) error {
	c := &Call{Candidates: batch, Admitted: dst, Allowed: a.m.code.Limits().For(len(batch))}
	return a.observe.watch(c, a.Stats, func() error { return a.ask(batch, dst) })
}

// ask calls the guest once. The guest may leave the answer to [AdmitsByDefault].
func (a *Admit) ask(batch []abi.Candidate, dst []bool) error {
	n := uint32(len(batch))
	args, err := sandbox.Records[abi.Candidate](a.in, abi.BufferArgs, n)
	if err != nil {
		return err
	}
	copy(args, batch)
	a.in.SetNow(batch[n-1].Time)
	got, ok, err := a.in.Count(&a.call, uint64(n), abi.CandidateSize, int(n), a.m.code.Limits().For(int(n)))
	if err != nil {
		return err
	}
	if !ok {
		admitDefault{}.Admit(batch, dst)
		return nil
	}
	if got != n {
		return a.fault(fmt.Sprintf("gave %d answers to %d candidates", got, n), nil)
	}
	answers, err := a.in.View(abi.BufferResult, n)
	if err != nil {
		return err
	}
	for i, answer := range answers {
		if answer > 1 {
			return a.fault(fmt.Sprintf("answered %d for candidate %d, want 0 or 1", answer, i), nil)
		}
		dst[i] = answer == 1
	}
	return nil
}
