package entries

import (
	"math/bits"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// The entries of a root are served while it is scanned: lookups find the entries that the scan has seen and those stored since.
// The evict policy is told nothing until the scan ends.

// firstLive is the start of the clock during a scan. Entries that the scan finds get earlier ticks.
const firstLive = 1 << 30

// BeginScan prepares the set for a scan.
func (s *Set) BeginScan() {
	s.scanning, s.removed = true, map[uint64]struct{}{}
	s.Evictor.SetScanning(true)
	s.Index.AdvanceClock(firstLive)
}

// EndScan ends the scan. The order of last touch must be set.
func (s *Set) EndScan() { s.scanning, s.removed = false, nil }

// Scanning reports whether a scan is running.
func (s *Set) Scanning() bool { return s.scanning }

// IsScanning is Scanning for callers without the lock, which it takes.
func (s *Set) IsScanning() bool {
	s.Lock()
	defer s.Unlock()
	return s.scanning
}

// Scan holds the results of one scan. It is guarded by the lock of its set.
type Scan struct {
	set      *Set
	stamps   []int64 // newest store time of an entry's pieces, by slot
	late     bool    // the order of touches is known, and found entries are the newest
	over     bool
	orphaned int64 // bytes of files that could not be read or have no place in the index
	unsure   []MarkedPiece
}

// MarkedPiece is a piece of an entry.
type MarkedPiece struct {
	Mark
	Rank uint32
}

// NewScan returns the record of a scan, or of files that are found after the scan.
func NewScan(s *Set, late bool) *Scan { return &Scan{set: s, late: late} }

// Twice reports that a file was found for a piece that its entry already has. Other is the path of the entry's file below the
// root, if it is a different one, and empty otherwise.
type Twice struct {
	Mark
	Other string
}

// Add enters a piece with a name, which is empty for the built-in one. The size of the entry is the sum of its pieces and of
// the missing pieces that their headers name. It takes the lock.
func (c *Scan) Add(cl *catalog.Class, h *pieceformat.Header, name string, allocated int64) Twice {
	tenant := c.set.cfg.Catalog.Tenants.Number(h.Tenant)
	c.set.Lock()
	defer c.set.Unlock()
	return c.AddOf(tenant, cl, h, name, allocated)
}

// AddOf is Add with a tenant's number. The lock must be held.
func (c *Scan) AddOf(
	tenant uint16, cl *catalog.Class, h *pieceformat.Header, name string, allocated int64,
) (found Twice) {
	s := c.set
	fp := kv.Fingerprint(h.Namespace, h.Group, h.Key)
	if c.over {
		return found // the scan has ended and has seen everything
	}
	slot := s.Index.Find(fp, cl.Base, &h.Key)
	if slot != index.None && s.Index.At(slot).Is(index.Evicting) {
		return found // being removed
	}
	if slot == index.None {
		parent := kv.Fingerprint(h.Namespace, h.Group, h.Parent)
		slot = s.Index.Add(fp, index.Owner{Class: cl.ID, Tenant: tenant}, &h.Key, parent, h.Depth)
		if slot == index.None {
			c.orphaned += allocated // more entries than slots: the bytes are in use all the same
			return found
		}
		cl.Ref()
		s.Hits.forget(slot)
	}
	e := s.Index.At(slot)
	c.stamp(slot, h.StoreTime)
	if s.Index.Pieces(slot)&(1<<h.Rank) != 0 {
		if found.Mark = (Mark{slot, fp}); !s.Index.HasName(slot, h.Rank, name) {
			found.Other = s.ClassOf(slot).NameOf(s.Index.NamesOf(slot), &h.Key, h.Rank)
		}
		return found
	}
	fresh := h.Pieces &^ s.Index.Reserved(slot) // includes h.Rank
	s.Index.ReservePieces(slot, fresh)
	diff := (int64(bits.OnesCount64(fresh)-1)*h.MostBytes() + allocated) / pieceformat.Page
	s.Index.Resize(slot, diff*pieceformat.Page)
	s.Account.Commit(s.Index.Owner(slot).Tenant, diff*pieceformat.Page)
	s.Account.Remove(capacity.Unscanned, allocated)
	s.Index.PieceWritten(slot, h.Rank)
	if name != "" {
		s.Index.AddName(slot, pieceformat.Name{Rank: h.Rank, Path: name})
	}
	if s.Index.Pieces(slot)&h.Pieces == h.Pieces && !e.Is(index.Complete) {
		e.Set(index.Complete)
		s.completed(slot, h.Parent)
	}
	s.expire(slot, cl, h.StoreTime)
	s.Count.Recovered++
	if _, ok := s.removed[fp]; ok {
		// An entry with this key was removed after the scan began, and this file may have been removed with it.
		c.unsure = append(c.unsure, MarkedPiece{Mark{slot, fp}, h.Rank})
	}
	return found
}

// AddListed enters an entry that has all of its pieces, from the information in their names. sizes holds their sizes by rank,
// negative for none. The bytes are billed to no tenant. It returns false if the entry exists with other files. It takes the
// lock.
func (c *Scan) AddListed(cl *catalog.Class, h *pieceformat.Header, sizes []int64) bool {
	s := c.set
	tenant := s.cfg.Catalog.Tenants.Number(catalog.UnknownTenant)
	s.Lock()
	defer s.Unlock()
	fp := kv.Fingerprint(h.Namespace, h.Group, h.Key)
	if slot := s.Index.Find(fp, cl.Base, &h.Key); slot != index.None { // as in a scan that is repeated
		known := s.Index.Pieces(slot)&h.Pieces == h.Pieces && !s.Index.At(slot).Is(index.Named)
		if known {
			c.stamp(slot, h.StoreTime)
		}
		return known
	}
	for rank, size := range sizes {
		if size >= 0 {
			h.Rank = uint32(rank)
			c.AddOf(tenant, cl, h, "", pieceformat.Padded(size))
		}
	}
	if slot := s.Index.Find(fp, cl.Base, &h.Key); slot != index.None {
		s.Index.At(slot).Set(index.Listed)
	}
	return true
}

// Describe completes an entry from AddListed with the header of one of its pieces. It takes the lock.
func (s *Set) Describe(m Mark, h *pieceformat.Header) {
	tenant := s.cfg.Catalog.Tenants.Number(h.Tenant)
	s.Lock()
	defer s.Unlock()
	if !s.Stands(m) || !s.Index.At(m.Slot).Is(index.Listed) {
		return
	}
	was, bytes := s.Index.Owner(m.Slot), s.Index.Bytes(m.Slot)
	is := index.Owner{Class: was.Class, Tenant: tenant}
	if !s.Index.Describe(m.Slot, is, kv.Fingerprint(h.Namespace, h.Group, h.Parent), h.Depth) {
		return
	}
	s.Account.Release(was.Tenant, bytes)
	s.Account.Commit(tenant, bytes)
	s.expire(m.Slot, s.ClassOf(m.Slot), h.StoreTime)
	s.Evictor.Describe(m.Slot, m.Fingerprint)
}

// stamp records the store time of a piece.
func (c *Scan) stamp(slot uint32, at int64) {
	if c.late {
		return
	}
	for uint32(len(c.stamps)) <= slot {
		c.stamps = append(c.stamps, 0)
	}
	c.stamps[slot] = max(c.stamps[slot], at)
}

// AddFile adds another file of a present piece to its entry. The file is removed together with the entry. The lock must be
// held.
func (s *Set) AddFile(of Twice, rank uint32, path string, allocated int64) {
	if _, named := pieceformat.NameOf(s.Index.NamesOf(of.Slot), rank); !named {
		s.Index.AddName(of.Slot, pieceformat.Name{Rank: rank, Path: of.Other}) // the first file is the one to read
	}
	if s.Index.AddName(of.Slot, pieceformat.Name{Rank: rank, Path: path}) {
		Rebook(s, of.Slot, s.Index.Bytes(of.Slot)+allocated)
	}
}

// Overlook records bytes of a file that the scan could not use. It takes the lock.
func (c *Scan) Overlook(bytes int64) {
	c.set.Lock()
	defer c.set.Unlock()
	c.orphaned += bytes
}

// Orphaned returns the bytes of files that could not be read or have no place in the index.
func (c *Scan) Orphaned() int64 { return c.orphaned }

// Stored returns the store time of an entry's newest piece. It is 0 if the scan has not seen the entry.
func (c *Scan) Stored(slot uint32) int64 {
	if int(slot) < len(c.stamps) {
		return c.stamps[slot]
	}
	return 0
}

// Close ends the record: later additions are ignored. It returns the pieces with files that may have been removed together with
// an entry during the scan. It takes the lock.
func (c *Scan) Close() (unsure []MarkedPiece) {
	c.set.Lock()
	defer c.set.Unlock()
	c.over = true
	return c.unsure
}

// Restore replaces the empty index by the index of a checkpoint.
func (s *Set) Restore(x *index.Index) {
	s.Index = x
	s.Evictor.SetIndex(x)
	x.Each(func(slot uint32, e *index.Entry) {
		s.ClassOf(slot).Ref()
		s.Account.Commit(x.Owner(slot).Tenant, x.Bytes(slot))
		if e.Is(index.Complete) {
			s.complete++
		}
		s.Count.Recovered += uint64(bits.OnesCount64(x.Pieces(slot)))
	})
	s.cfg.Changes.Reset() // a root that is opened late adds entries without changes
}
