package index

import (
	"encoding/binary"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Entry is the fixed part of what the index knows of a chunk. The whole key is in it, so that the index compares whole
// keys and every file can be named. Numbers are bytes, little-endian, so that nothing is padded. A value that does not
// fit its field is rare and is in a map of the [Index].
type Entry struct {
	head       [keyHead]byte
	parent     [8]byte // fingerprint of the parent; 0 for none
	tick       [4]byte // last touch, see Index.Touch; the next free slot when the slot is free
	ownerState [4]byte // owner<<8 | state bits
	units      uint16  // reserved for all pieces, in abi.SizeUnit: see Index.Units
	depth      uint16  // chunks from the prefix's root; maxDepth also for more
	pins       uint8   // leases, open pieces and writes: see Index.Pin
	pieces     uint8   // number of the set of pieces that are there: see Index.Pieces
}

// longEntry is an entry with a key that has a second half.
type longEntry struct {
	Entry
	tail [keyTail]byte
}

const (
	keyHead  = 16
	keyTail  = kv.KeyBytes - keyHead
	maxDepth = 1<<16 - 1
)

// None is the slot of nothing.
const None = abi.None

// State bits of an entry.
const (
	Live      = 1 << iota // in use
	Evicting              // the policy was sent REMOVE and the files are being unlinked; lookups miss
	Detached              // no longer found by key; waits for its last pin
	Complete              // all pieces that some put or header named are there
	Named                 // some piece has another name than the built-in one: see [Index.Names]
	Announced             // the evict policy knows it
	Moving                // it is copied to another level, or waits for that
	Listed                // entered by its files' names: its parent, depth and tenant are not known
	stateBits = 0xff
)

func (e *Entry) word() uint32 { return binary.LittleEndian.Uint32(e.ownerState[:]) }

func (e *Entry) State() uint8 { return e.ownerState[0] }

// Is says whether all of these state bits are set.
func (e *Entry) Is(bits uint8) bool { return e.ownerState[0]&bits == bits }

// Any says whether one of these state bits is set.
func (e *Entry) Any(bits uint8) bool { return e.ownerState[0]&bits != 0 }

func (e *Entry) Set(bits uint8) { e.ownerState[0] |= bits }

func (e *Entry) Unset(bits uint8) { e.ownerState[0] &^= bits }

// OwnerID is the number of the entry's owner: see [Index.Owner].
func (e *Entry) OwnerID() uint32 { return e.word() >> 8 }

func (e *Entry) setOwner(id uint32) {
	binary.LittleEndian.PutUint32(e.ownerState[:], id<<8|e.word()&stateBits)
}

// Parent is the fingerprint of the parent; 0 for none.
func (e *Entry) Parent() uint64 { return binary.LittleEndian.Uint64(e.parent[:]) }

func (e *Entry) setParent(fp uint64) { binary.LittleEndian.PutUint64(e.parent[:], fp) }

// LastTouch is the tick of the last touch; 0 before the first.
func (e *Entry) LastTouch() uint32 { return binary.LittleEndian.Uint32(e.tick[:]) }

// SetLastTouch sets the tick of the last touch.
func (e *Entry) SetLastTouch(tick uint32) { binary.LittleEndian.PutUint32(e.tick[:], tick) }

// Depth is how many chunks the entry is from the prefix's root, 65,535 at most.
func (e *Entry) Depth() uint32 { return uint32(e.depth) }

// Pins is the number of pins, 255 at most.
func (e *Entry) Pins() uint8 { return e.pins }

// Owner is what many entries have in common, so that an entry names it in three bytes. The class says in which
// namespace and group the entries are and who named their files.
type Owner struct{ Class, Tenant uint16 }

// ownerTable numbers owners. A number is never freed: the number of a class that has ended is soon another class's.
type ownerTable struct {
	list []Owner
	ids  map[Owner]uint32
}

// MaxOwners bounds the numbers of owners; itself it is no owner's.
const MaxOwners = 1 << 24

// InternOwner returns the number of an owner. It is false when there are too many.
func (t *ownerTable) InternOwner(o Owner) (uint32, bool) {
	if len(t.list) > 0 && t.list[0] == o {
		return 0, true // a root with one owner is the usual case
	}
	id, ok := t.ids[o]
	if ok || len(t.list) == MaxOwners {
		return id, ok
	}
	id = uint32(len(t.list))
	t.list = append(t.list, o)
	t.ids[o] = id
	return id, true
}

// Owners are all owners by number, also those that no entry has any more. The list must not be changed.
func (t *ownerTable) Owners() []Owner { return t.list }

// Owner is the owner of the entry in a slot.
func (x *Index) Owner(slot uint32) Owner { return x.list[x.At(slot).OwnerID()] }

// HasBase says whether an entry is of a class with this base.
func (x *Index) HasBase(e *Entry, base uint16) bool {
	class := x.list[e.OwnerID()].Class
	return class == base || x.base(class) == base
}
