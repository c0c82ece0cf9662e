package abi

import "unsafe"

// Op says what happened to an entry.
type Op uint8

const (
	OpInsert     Op = 1 // space was reserved for a new entry
	OpTouch      Op = 2 // a lookup granted a lease on it: once per request and entry, in key order
	OpRemove     Op = 3 // it is gone; its slot may be reused, and its children no longer have a parent
	OpLink       Op = 4 // its parent came back: Parent now names it
	OpPin        Op = 5 // it must not be named as a victim
	OpUnpin      Op = 6 // it may be named again
	OpResident   Op = 7 // replay after a start, in order of last touch: it was here already
	OpRequestEnd Op = 8 // a request has ended: the record is a RequestEnd
)

var opNames = [...]string{"", "insert", "touch", "remove", "link", "pin", "unpin", "resident", "request_end"}

func (o Op) String() string {
	if int(o) < len(opNames) && o != 0 {
		return opNames[o]
	}
	return "unknown"
}

// Event is one record of the EVENTS buffer, of every Op but OpRequestEnd: 56 bytes. Events are totally ordered per slot and
// none is dropped. The record is append-only: a later host may announce a longer stride, and a guest reads the part it knows.
type Event struct {
	Slot      uint32 // the entry's slot, below Info.MaxSlots
	Parent    uint32 // the parent entry's slot, or None when it is not resident
	Key       uint64 // fingerprint of (namespace, group, key)
	ParentKey uint64 // fingerprint of the parent's, 0 for a prefix's root
	Size      uint32 // bytes of the whole entry (all pieces) in SizeUnit
	Depth     uint32 // chunks from the prefix's root: 0 for the first
	Request   uint32 // the request that caused it, 0 for none; wraps
	Tenant    uint32
	Op        Op
	reserved  [7]byte // not blank: copies keep what a RequestEnd has here
	Time      uint64  // nanoseconds, monotonic within a run of the host
}

// SetOp sets the op of an event that is written over another record. It zeroes what is reserved, in the same store.
func (e *Event) SetOp(op Op) { *(*uint64)(unsafe.Pointer(&e.Op)) = uint64(op) }

// EventSize is the stride of an [Event] in this version.
const EventSize = 56
