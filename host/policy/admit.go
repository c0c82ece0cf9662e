package policy

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// AdmitOptions bind an admission policy.
type AdmitOptions struct {
	Capacity      uint64 // bytes behind it, over all roots
	Seed          uint64
	Config        Config
	MaxNamespaces uint32 // ids are below this; 0 for 1,024
}

// Admit decides which entries are stored at all. It is safe for concurrent use; calls take turns.
type Admit struct {
	m     *Module
	meter meter
	mu    sync.Mutex
	limit uint32
	guest guest.Admitter
	err   error
}

// NewAdmit makes an instance.
func (m *Module) NewAdmit(ctx context.Context, o AdmitOptions) (*Admit, error) {
	s := settings{role: abi.RoleAdmit, capacity: o.Capacity, seed: o.Seed, config: o.Config, namespaces: o.MaxNamespaces}
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	g, err := native[guest.Admitter](m, &s)
	if err != nil {
		return nil, err
	}
	return &Admit{m: m, guest: g, limit: s.namespaces}, nil
}

// Namespace tells the policy a namespace's text, before any candidate that names its id.
func (a *Admit) Namespace(id uint32, text string) error {
	if err := checkNamespace(a.m, id, a.limit, text); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		return a.err
	}
	if n, ok := a.guest.(guest.Namespacer); ok {
		n.Namespace(id, text)
	}
	return nil
}

// Admit writes one answer per candidate. dst is at least as long as the batch.
func (a *Admit) Admit(batch []abi.Candidate, dst []bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(batch) > 0 {
		if a.err != nil {
			return a.err
		}
		n := min(len(batch), batchSize)
		start := time.Now()
		a.guest.Admit(batch[:n], dst[:n])
		a.meter.add(start, n)
		batch, dst = batch[n:], dst[n:]
	}
	return nil
}

// Close ends the policy.
func (a *Admit) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = ErrClosed
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
