package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// Entry is what a lookup asks for: a key of a namespace, both by number.
type Entry struct {
	Space int
	Key   uint64
}

func (e Entry) String() string { return fmt.Sprintf("%d/%d", e.Space, e.Key) }

// Piece is one rank's part of an entry.
type Piece struct {
	Entry
	Rank uint32
}

func (p Piece) String() string { return fmt.Sprintf("%s/%d", p.Entry, p.Rank) }

// parsePiece reads SPACE/KEY and, for a piece, /RANK.
func parsePiece(text string) (p Piece) {
	_, _ = fmt.Sscanf(text, "%d/%d/%d", &p.Space, &p.Key, &p.Rank)
	return p
}

// model knows which bytes may be served. It is safe for concurrent use.
type model struct {
	mu      sync.Mutex
	version uint64
	offered map[Piece]map[uint64]bool // versions that were written under a piece's name
	damaged map[Entry]bool            // some file was damaged or removed behind the stores' back
	hits    int64
}

func newModel() *model {
	return &model{offered: map[Piece]map[uint64]bool{}, damaged: map[Entry]bool{}}
}

// begin notes that a piece is being stored and returns the version of what will be written.
func (m *model) begin(of Piece) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.offered[of] == nil {
		m.offered[of] = map[uint64]bool{}
	}
	m.version++
	return m.version
}

// written notes that a version may be served from now on.
func (m *model) written(of Piece, version uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.offered[of][version] = true
}

// known says whether a put of the piece was ever begun.
func (m *model) known(of Piece) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.offered[of]) > 0
}

// served judges the payload of a load that succeeded.
func (m *model) served(of Piece, payload []byte) error {
	version, whole := versionOf(of, payload)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hits++
	switch {
	case !m.offered[of][version]:
		return fmt.Errorf("piece %s: served version %d, which was never offered under that name", of, version)
	case !whole:
		return fmt.Errorf("piece %s: the served bytes are not those of version %d", of, version)
	}
	return nil
}

func (m *model) isDamaged(e Entry) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.damaged[e]
}

func (m *model) setDamaged(e Entry, damaged bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if damaged {
		m.damaged[e] = true
	} else {
		delete(m.damaged, e)
	}
}

// acceptable says whether a put may end in an error.
func acceptable(err error) bool {
	return err == nil || isAny(err, store.ErrResident, store.ErrNoSpace, store.ErrRefused, store.ErrGone, store.ErrRootOut,
		faultfs.ErrInjected, faultfs.ErrPowerLost, shared.ErrFenced, shared.ErrDoubt)
}

// isLoss says that an error ends what was known of a piece: its bytes are bad or gone.
func isLoss(err error) bool {
	return pieceformat.IsDamage(err) || isAny(err, store.ErrGone, kv.ErrChecksum, pieceformat.ErrWrongPiece)
}

func isAny(err error, list ...error) bool {
	for _, e := range list {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// durable is what a host owes after a crash: the entries that were hits, where a piece is durable before it is one.
type durable struct {
	entries []Entry
	sealed  bool // the life has ended
}

// update looks at what is durable after an operation.
func (d *durable) update(n *node) error {
	if n.store == nil || n.died() || d.sealed || !n.Strict {
		return nil
	}
	list, err := n.present()
	d.entries = list
	return err
}

// ends notes that a life ends, or has ended at a call that is past: what was evicted meanwhile is not owed any more.
func (d *durable) ends(n *node) {
	if d.sealed || n.store == nil {
		return
	}
	d.sealed = true
	d.entries = slices.DeleteFunc(d.entries, func(e Entry) bool {
		there, err := n.hit(e)
		return err == nil && !there
	})
}

// reopened checks that what is owed is there. Evicted files whose removal was lost come back, and may have pushed
// others out when the store opened.
func (d *durable) reopened(n *node) error {
	d.sealed = false
	var kept []Entry
	for _, e := range d.entries {
		there, err := n.hit(e)
		if err != nil {
			return err
		}
		if there {
			kept = append(kept, e)
		}
	}
	missing, evicted := len(d.entries)-len(kept), n.store.Stats().Roots[0].Evictions
	if uint64(missing) > uint64(evicted) {
		return fmt.Errorf("host %s: of the durable entries %v only %v are hits, and %d were evicted",
			n.ID, d.entries, kept, evicted)
	}
	d.entries = kept
	return nil
}

func (d *durable) owes(e Entry) bool { return slices.Contains(d.entries, e) }
