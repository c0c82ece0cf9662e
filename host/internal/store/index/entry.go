package index

import (
	"encoding/binary"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Entry is the fixed-size part of an index entry. It holds the whole key, so that the index compares whole keys and can name
// every file. Numbers are stored as little-endian bytes, which avoids padding. Values that do not fit their field are rare and
// are in maps of the [Index].
type Entry struct {
	head       [keyHead]byte
	parent     [8]byte // fingerprint of the parent; 0 if there is none
	tick       [4]byte // last touch: see Index.Touch; next free slot if the slot is free
	ownerState [4]byte // owner<<8 | state bits
	units      uint16  // size reserved for all pieces in abi.SizeUnit: see Index.Units
	depth      uint16  // chunks from the root of the prefix; capped at maxDepth
	pins       uint8   // number of leases, open pieces and writes: see Index.Pin
	pieces     uint8   // number of the set of present pieces: see Index.Pieces
}

// longEntry is an entry with the second half of a long key.
type longEntry struct {
	Entry
	tail [keyTail]byte
}

const (
	keyHead  = 16
	keyTail  = kv.KeyBytes - keyHead
	maxDepth = 1<<16 - 1
)

// None stands for no slot.
const None = abi.None

// State bits of an entry.
const (
	Live      = 1 << iota // in use
	Evicting              // the policy was sent REMOVE, and the files are being unlinked; lookups miss
	Detached              // no longer found by key; freed after its last pin
	Complete              // all pieces that a put or a header named are present
	Named                 // a piece has a name other than the built-in one: see [Index.Names]
	Announced             // the evict policy knows the entry
	Moving                // being copied to another level, or waiting for that
	Listed                // entered by the names of its files; parent, depth and tenant are unknown
	stateBits = 0xff
)

func (e *Entry) word() uint32 { return binary.LittleEndian.Uint32(e.ownerState[:]) }

func (e *Entry) State() uint8 { return e.ownerState[0] }

// Is reports whether all of these state bits are set.
func (e *Entry) Is(bits uint8) bool { return e.ownerState[0]&bits == bits }

// Any reports whether any of these state bits is set.
func (e *Entry) Any(bits uint8) bool { return e.ownerState[0]&bits != 0 }

func (e *Entry) Set(bits uint8) { e.ownerState[0] |= bits }

func (e *Entry) Unset(bits uint8) { e.ownerState[0] &^= bits }

// OwnerID returns the number of the entry's owner: see [Index.Owner].
func (e *Entry) OwnerID() uint32 { return e.word() >> 8 }

func (e *Entry) setOwner(id uint32) {
	binary.LittleEndian.PutUint32(e.ownerState[:], id<<8|e.word()&stateBits)
}

// Parent returns the fingerprint of the parent. 0 means none.
func (e *Entry) Parent() uint64 { return binary.LittleEndian.Uint64(e.parent[:]) }

func (e *Entry) setParent(fp uint64) { binary.LittleEndian.PutUint64(e.parent[:], fp) }

// LastTouch returns the tick of the last touch. It is 0 before the first touch.
func (e *Entry) LastTouch() uint32 { return binary.LittleEndian.Uint32(e.tick[:]) }

// SetLastTouch sets the tick of the last touch.
func (e *Entry) SetLastTouch(tick uint32) { binary.LittleEndian.PutUint32(e.tick[:], tick) }

// Depth returns the number of chunks from the root of the prefix, at most 65,535.
func (e *Entry) Depth() uint32 { return uint32(e.depth) }

// Pins returns the number of pins, at most 255.
func (e *Entry) Pins() uint8 { return e.pins }

// Owner is the combination of class and tenant. Many entries share it, so an entry refers to it by a number of three bytes. The
// class determines the namespace, the group and the layout plan.
type Owner struct{ Class, Tenant uint16 }

// ownerTable numbers owners. It frees no number: a new class soon gets the number of an ended one, and the owner is then in use
// again.
type ownerTable struct {
	list []Owner
	ids  map[Owner]uint32
}

// MaxOwners is the limit of owner numbers, which are all less.
const MaxOwners = 1 << 24

// InternOwner returns the number of an owner. It returns false if there are too many owners.
func (t *ownerTable) InternOwner(o Owner) (uint32, bool) {
	if len(t.list) > 0 && t.list[0] == o {
		return 0, true // most roots have a single owner
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

// Owners returns all owners by number, including those without entries. The caller must not change the list.
func (t *ownerTable) Owners() []Owner { return t.list }

// Owner returns the owner of the entry in a slot.
func (x *Index) Owner(slot uint32) Owner { return x.list[x.At(slot).OwnerID()] }

// HasBase reports whether the class of an entry has this base.
func (x *Index) HasBase(e *Entry, base uint16) bool {
	class := x.list[e.OwnerID()].Class
	return class == base || x.base(class) == base
}
