package abi

import "unsafe"

// Op is the kind of an event.
type Op uint8

const (
	OpInsert     Op = 1 // space was reserved for a new entry
	OpTouch      Op = 2 // a lookup granted a lease on the entry; sent once per request and entry, in key order
	OpRemove     Op = 3 // the entry is gone; its slot may be reused, and its children no longer have a parent
	OpLink       Op = 4 // the entry's parent is resident again, and Parent names it
	OpPin        Op = 5 // the entry must not be named as a victim
	OpUnpin      Op = 6 // the entry may be named again
	OpResident   Op = 7 // replay after a start in the order of the last touch: the entry was resident before
	OpRequestEnd Op = 8 // a request has ended; the record is a RequestEnd
)

var opNames = [...]string{"", "insert", "touch", "remove", "link", "pin", "unpin", "resident", "request_end"}

func (o Op) String() string {
	if int(o) < len(opNames) && o != 0 {
		return opNames[o]
	}
	return "unknown"
}

// Event is a record of the EVENTS buffer for every Op but OpRequestEnd. It has 56 bytes. Events are totally ordered per slot
// and none is dropped. The record is append-only: a later host may announce a longer stride, and a guest reads the part that it
// knows.
type Event struct {
	Slot      uint32 // the entry's slot, below Info.MaxSlots
	Parent    uint32 // slot of the parent entry, or None if it is not resident
	Key       uint64 // fingerprint of (namespace, group, key)
	ParentKey uint64 // fingerprint of the parent; 0 for the first chunk of a prefix
	Size      uint32 // bytes of the whole entry (all pieces) in SizeUnit
	Depth     uint32 // chunks from the root of the prefix; 0 for the first
	Request   uint32 // request that caused the event; 0 for none; wraps around
	Tenant    uint32
	Op        Op
	reserved  [7]byte // not a blank field, because copies must keep the content of a RequestEnd
	Time      uint64  // nanoseconds, monotonic within a run of the host
}

// SetOp sets the op of an event that is written over another record. The same store zeroes the reserved bytes.
func (e *Event) SetOp(op Op) { *(*uint64)(unsafe.Pointer(&e.Op)) = uint64(op) }

// EventSize is the stride of an [Event] in this version.
const EventSize = 56
