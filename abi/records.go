package abi

// Info is the content of the INFO buffer for kv_init: this header, followed by ConfigLen bytes of configuration at
// offset Size. The configuration is UTF-8 text of lines "key=value\n", sorted by key. It is the policy's own table in
// the operator's TOML file, with nested names joined by dots.
type Info struct {
	Size          uint32 // bytes of this header
	ABI           uint32 // Version
	Features      uint64 // features of the host: FeatureHints, FeatureLevels
	EventStride   uint32
	AskStride     uint32
	AdmitStride   uint32
	PlaceStride   uint32
	_             uint32 // 0; ABI 1 had a stride here at first
	PlaneStride   uint32
	RootStride    uint32
	MaxSlots      uint32 // all slots are below this number; 0 for roles without slots
	MaxBatch      uint32 // most records in one call
	MaxVictims    uint32 // most victims in one answer
	MaxNamespaces uint32 // all namespace ids are below this number
	ConfigLen     uint32
	Capacity      uint64 // capacity of the root in bytes; 0 if there is none
	Seed          uint64 // seed for randomised policies; the same seed and events give the same decisions
}

// InfoSize is Info.Size in this version.
const InfoSize = 80

// Ask is the record in the ARGS buffer for kv_step: the bytes to free. The guest writes victims as u32 slots to RESULT,
// best victim first, and returns their number. It may name fewer than would free Bytes.
type Ask struct {
	Bytes      uint64 // bytes to free, over all victims
	MaxVictims uint32 // most slots in the answer
	Tenant     uint32 // name only entries of this tenant; None means any
}

// AskSize is the stride of an [Ask].
const AskSize = 16

// Candidate asks kv_admit whether an entry should be stored at all, or copied to another level. The guest answers one byte for
// each, 0 or 1.
type Candidate struct {
	Key       uint64 // fingerprint as in [Event]
	ParentKey uint64
	Namespace uint32
	Group     uint32
	Size      uint32 // in SizeUnit
	Depth     uint32
	Request   uint32
	Tenant    uint32
	Flags     uint32 // CandidateParentResident, CandidateContinued, CandidateLast, CandidateRoom
	Copies    uint32 // number of other hosts that are known to have the entry
	Time      uint64
	Kind      CandidateKind
	From      uint8 // level that the entry would leave or be copied from; PeerLevel for another host; NoLevel for an entry that an engine stores
	To        uint8 // level that would receive the entry; 0 is the nearest; PeerLevel for another host
	_         uint8
	Hits      uint32 // lookups that granted the entry since it became resident in From; 0 for a new entry
}

// CandidateSize is the stride of a [Candidate].
const CandidateSize = 64

// Bits of Candidate.Flags.
const (
	// CandidateParentResident is set if the candidate's parent is resident in any level.
	CandidateParentResident = 1 << 0
	// CandidateContinued is set if a child of the candidate is resident in any level, or is stored with it.
	CandidateContinued = 1 << 1
	// CandidateLast is set if this host has no level of its own behind To.
	CandidateLast = 1 << 2
	// CandidateRoom is set for a promotion if level To has room for the candidate, so that no entry must be evicted for
	// it.
	CandidateRoom = 1 << 3
)

// CandidateKind is the consequence of admitting a candidate.
type CandidateKind uint8

const (
	KindNew       CandidateKind = 0 // an engine stores it, or level From has just stored it and writes it through
	KindDemotion  CandidateKind = 1 // its level evicts it, and a farther one would keep it
	KindPromotion CandidateKind = 2 // it was loaded, and a nearer level would get a copy
)

// NoLevel is the value of [Candidate].From for an entry that an engine stores.
const NoLevel = 0xff

// PeerLevel is another host, behind all levels of this one. It is the value of [Candidate].From for an entry that the
// host lends or offers, and of To for an entry that would be offered to the host.
const PeerLevel = 0xfe

// FeatureLevels is the bit of Info.Features that announces Kind, From, To and Hits in candidates.
const FeatureLevels = 1 << 1

// KeyBytes is the size of a key in place records. Shorter keys are padded with zeros, and KeyLen is the number of valid
// bytes.
const KeyBytes = 32

// PlaceQuery asks kv_place for the root and the path of one piece. The host asks once for each piece and stores the
// answer with it.
type PlaceQuery struct {
	Namespace uint32
	Group     uint32
	Rank      uint32
	KeyLen    uint32
	Size      uint32 // size of the whole entry in SizeUnit
	_         uint32
	Key       [KeyBytes]byte
}

// PlaceQuerySize is the stride of a [PlaceQuery].
const PlaceQuerySize = 56

// PlaceAnswer is one answer of kv_place. The answers are an array at the start of RESULT. Off counts from the start of
// RESULT, and Len bytes there are a relative path. A path has 1 to 8 components joined by '/', and at most 1,024 bytes.
// A component has 1 to 255 bytes of [A-Za-z0-9._=@+-] and does not begin with a dot.
type PlaceAnswer struct {
	Root uint32 // index into the ROOTS records; None if the host should choose
	Off  uint32
	Len  uint32
	_    uint32
}

// PlaceAnswerSize is the stride of a [PlaceAnswer].
const PlaceAnswerSize = 16

// RootsHeader is the start of the ROOTS buffer. Count records of Stride bytes follow at offset 8.
type RootsHeader struct {
	Count  uint32
	Stride uint32
}

// RootsHeaderSize is the size of a [RootsHeader].
const RootsHeaderSize = 8

// RootFacts are the live facts about one root. The host updates them at intervals, not for each call.
type RootFacts struct {
	ID       uint32
	Flags    uint32 // RootWritable
	Capacity uint64 // bytes
	Free     uint64 // bytes
	ReadBps  uint64 // measured bytes per second; 0 while unknown
	WriteBps uint64
}

// RootFactsSize is the stride of [RootFacts].
const RootFactsSize = 40

// RootWritable is set for a root that accepts stores.
const RootWritable = 1

// LayoutHeader is the start of ARGS for kv_layout. The n plane records of the call follow at offset 16.
type LayoutHeader struct {
	Namespace uint32
	Group     uint32
	Blocks    uint32 // blocks in one chunk
	Planes    uint32 // equal to the call's n
}

// LayoutHeaderSize is the size of a [LayoutHeader].
const LayoutHeaderSize = 16

// Plane is one stream of pages: the K of a layer, its V, or both if the engine keeps them together.
type Plane struct {
	Layer     uint32
	Part      uint32 // 0 for K or a fused page, 1 for V, higher numbers for auxiliary caches
	PageBytes uint32 // bytes of one block's page
	_         uint32
}

// PlaneSize is the stride of a [Plane].
const PlaneSize = 16

// Segment is one record of a layout: for one plane, the byte range [PageOff, PageOff+PageLen) of the pages of Blocks
// consecutive blocks, one after the other. Gap zero bytes (fewer than 4,096) precede it. The segments of a layout, in
// order, make up the payload. Together they must cover each byte of each page exactly once.
type Segment struct {
	Plane   uint32 // index into the plane records
	Block   uint32 // first block within the chunk
	Blocks  uint32
	PageOff uint32
	PageLen uint32
	Gap     uint32
}

// SegmentSize is the stride of a [Segment].
const SegmentSize = 24
