package storetest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/anishathalye/porcupine"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
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

// model keeps what was asked of each piece, and what came of it. It is safe for concurrent use.
type model struct {
	levels  bool
	mu      sync.Mutex
	now     int64 // moves with each operation that begins or ends
	asked   map[Piece][]porcupine.Operation
	damaged map[Entry]bool // some file was damaged or removed behind the stores' back
	unclear map[Entry]bool // one ever was
	hits    int64
}

func newModel(levels bool) *model {
	return &model{levels: levels, asked: map[Piece][]porcupine.Operation{}, damaged: map[Entry]bool{}, unclear: map[Entry]bool{}}
}

// act is what is done with a piece. Each put of a history writes a version of its own.
type act struct {
	verb    string
	version uint64
}

const (
	stored    = "stored"
	offered   = "offered" // it is there, or what stood there is
	granted   = "granted" // a lookup has it
	ended     = "ended"   // what a lookup got
	loaded    = "loaded"
	discarded = "discarded"
	died      = "died" // its host; a removal may come to nothing
)

// never is when an operation ends that failed: what it began may take effect at any time.
const never = math.MaxInt64

// held is what a root has of a piece: a version or none, and so many leases on it.
type held struct {
	version uint64
	leases  int
	unknown bool // it may be any version
}

// serial is how a root would do one operation with a piece after the other. It may evict what no lease is on, without a
// word: then the next store finds nothing.
var serial = porcupine.NondeterministicModel{
	Init: func() []any { return []any{held{}} },
	Step: func(state, input, _ any) []any {
		h, a := state.(held), input.(act)
		next, ok := h, true
		switch a.verb {
		case stored, offered:
			var list []any
			if next.version, next.unknown = a.version, false; h.leases == 0 {
				list = append(list, next)
			}
			if a.verb == offered && (h.version != 0 || h.unknown) {
				list = append(list, h)
			}
			return list
		case granted:
			ok = h.version != 0 || h.unknown
			next.leases++
		case ended:
			next.leases--
		case loaded:
			ok = h.version == a.version || h.unknown
			next.version, next.unknown = a.version, false
		case discarded:
			ok = h.leases == 0
			next = held{}
		case died:
			next = held{unknown: true}
		}
		if !ok {
			return nil
		}
		return []any{next}
	},
}

// copies is what levels have of a piece: a version in each, since a client stores near what only a farther level has.
type copies struct {
	versions string // in their order
	leases   int
	unknown  bool // they may be any
}

func (c copies) with(version uint64) copies {
	if word := fmt.Sprintf("%d,", version); !c.has(version) {
		words := append(strings.SplitAfter(c.versions, ","), word)
		slices.Sort(words)
		c.versions = strings.Join(words, "")
	}
	return c
}

func (c copies) has(version uint64) bool {
	return slices.Contains(strings.Split(c.versions, ","), fmt.Sprint(version))
}

// serialOfLevels is serial for levels. Any copy may go without a word, and then another is served, as long as none is discarded: a key
// names what is in its chunk, whoever has computed it.
var serialOfLevels = porcupine.Model{
	Init: func() any { return copies{} },
	Step: func(state, input, _ any) (ok bool, next any) {
		c, a := state.(copies), input.(act)
		switch a.verb {
		case stored, offered:
			return true, c.with(a.version)
		case granted:
			c.leases++
			return c.versions != "" || c.unknown, c
		case ended:
			c.leases--
			return true, c
		case loaded:
			return c.has(a.version) || c.unknown, c.with(a.version)
		case discarded:
			return c.leases == 0, copies{}
		default:
			c.unknown = true
			return true, c
		}
	},
}

// tick is the time at which an operation begins. There is no other like it.
func (m *model) tick() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now++
	return m.now
}

// did notes an operation that has ended.
func (m *model) did(of Piece, a act, began int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now++
	m.asked[of] = append(m.asked[of], porcupine.Operation{Input: a, Call: began, Return: m.now})
}

// dies notes that a host has ended after which files may come back.
func (m *model) dies() {
	now := m.tick()
	for of := range m.asked {
		m.did(of, act{verb: died}, now)
	}
}

// written notes that a version may be served from now on. The returned function says that the put has ended well.
func (m *model) written(of Piece, a act) (published func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now++
	i := len(m.asked[of])
	m.asked[of] = append(m.asked[of], porcupine.Operation{Input: a, Call: m.now, Return: never})
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.now++
		m.asked[of][i].Return = m.now
	}
}

// served judges the payload of a load that succeeded.
func (m *model) served(of Piece, payload []byte, began int64) error {
	version, whole := versionOf(of, payload)
	m.did(of, act{loaded, version}, began)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hits++
	known := func(op porcupine.Operation) bool {
		return op.Input == act{stored, version} || op.Input == act{offered, version}
	}
	switch {
	case !slices.ContainsFunc(m.asked[of], known):
		return fmt.Errorf("piece %s: served version %d, which was never offered under that name", of, version)
	case !whole:
		return fmt.Errorf("piece %s: the served bytes are not those of version %d", of, version)
	}
	return nil
}

// judge says of which piece no order explains what came of its operations, each at some moment between its begin and its
// end.
func (m *model) judge() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	order := serial.ToModel()
	if m.levels {
		order = serialOfLevels
	}
	for of, ops := range m.asked {
		// A store that failed, and was not seen, explains nothing.
		ops = slices.DeleteFunc(slices.Clone(ops), func(op porcupine.Operation) bool {
			seen := func(o porcupine.Operation) bool { return o.Input == act{loaded, op.Input.(act).version} }
			return op.Return == never && !slices.ContainsFunc(ops, seen)
		})
		if !m.unclear[of.Entry] && !porcupine.CheckOperations(order, ops) {
			var text strings.Builder
			for _, op := range ops {
				fmt.Fprintf(&text, "\n%d to %d: %v", op.Call, op.Return, op.Input)
			}
			return fmt.Errorf("piece %s: no order explains%s", of, &text)
		}
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
		m.damaged[e], m.unclear[e] = true, true
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
