package store

import (
	"path/filepath"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/entries"
)

// strict says whether the piece is durable before it is resident.
func (p *Put) strict() bool { return p.root.store.cfg.Strict }

func (p *Put) syncName() error {
	if !p.strict() {
		return nil
	}
	err := p.root.SyncName(filepath.Dir(p.target))
	if err != nil {
		p.root.kind.discard(p.target, p.class.FileBytes())
	}
	return err
}

// marks collects entries. It has its own lock, which is taken after the root's.
type marks struct {
	mu   sync.Mutex
	list []entries.Mark
}

func (m *marks) add(more ...entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = append(m.list, more...)
}

func (m *marks) take() (list []entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	list, m.list = m.list, nil
	return list
}
