package abi

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
	OpRequestEnd Op = 8 // Request has ended; Slot is None
)

var opNames = [...]string{"", "insert", "touch", "remove", "link", "pin", "unpin", "resident", "request_end"}

func (o Op) String() string {
	if int(o) < len(opNames) && o != 0 {
		return opNames[o]
	}
	return "unknown"
}

// Event is one record of the EVENTS buffer: 56 bytes. Events are totally ordered per slot and none is dropped. The
// record is append-only: a later host may announce a longer stride, and a guest reads the part it knows.
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
	Tier      uint8
	Flags     uint16
	_         uint32
	Time      uint64 // nanoseconds, monotonic within a run of the host
}

// EventSize is the stride of an [Event] in this version.
const EventSize = 56
