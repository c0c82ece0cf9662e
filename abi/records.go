package abi

// Info is what kv_init finds in the INFO buffer: this header, then ConfigLen bytes of configuration at offset Size.
// The configuration is UTF-8 text of lines "key=value\n", sorted by key: the policy's own table in the operator's TOML
// file, flattened with dots.
type Info struct {
	Size          uint32 // bytes of this header
	ABI           uint32 // Version
	Features      uint64 // host feature bits, FeatureHints, FeatureLevels
	EventStride   uint32
	AskStride     uint32
	AdmitStride   uint32
	PlaceStride   uint32
	_             uint32 // 0; ABI 1 once had a stride here
	PlaneStride   uint32
	RootStride    uint32
	MaxSlots      uint32 // slots are below this; 0 for roles without slots
	MaxBatch      uint32 // most records in one call
	MaxVictims    uint32 // most victims asked for in one call
	MaxNamespaces uint32 // namespace ids are below this
	ConfigLen     uint32
	Capacity      uint64 // bytes the root may hold; 0 when it does not apply
	Seed          uint64 // for randomised policies; the same seed and events give the same decisions
}

// InfoSize is Info.Size in this version.
const InfoSize = 80

// Ask is the single record that kv_step finds in the ARGS buffer: what is to be freed. The guest writes victims as u32
// slots to RESULT, best victim first, and answers how many. Fewer than would free Bytes is legal.
type Ask struct {
	Bytes      uint64 // to free, over all victims
	MaxVictims uint32 // at most so many slots
	Tenant     uint32 // only this tenant's entries, or None for any
}

// AskSize is the stride of an [Ask].
const AskSize = 16

// Candidate asks kv_admit whether an entry should be stored at all, or moved to another level. The guest answers one byte
// each, 0 or 1.
type Candidate struct {
	Key       uint64 // fingerprint, as in [Event]
	ParentKey uint64
	Namespace uint32
	Group     uint32
	Size      uint32 // SizeUnit
	Depth     uint32
	Request   uint32
	Tenant    uint32
	Flags     uint32 // CandidateParentResident, CandidateContinued, CandidateLast, CandidateRoom
	Copies    uint32 // other hosts that are known to have it
	Time      uint64
	Kind      CandidateKind
	From      uint8 // the level that it would leave or be copied from; PeerLevel; NoLevel for what an engine stores
	To        uint8 // the level that would receive it; 0 is the nearest; PeerLevel
	_         uint8
	Hits      uint32 // lookups that granted it since it became resident where it is; 0 for a new one
}

// CandidateSize is the stride of a [Candidate].
const CandidateSize = 64

// Bits of Candidate.Flags.
const (
	// CandidateParentResident is set when the candidate's parent is resident, in any level.
	CandidateParentResident = 1 << 0
	// CandidateContinued is set when a child of the candidate is resident, in any level, or is stored with it.
	CandidateContinued = 1 << 1
	// CandidateLast is set when this host has no level of its own behind To.
	CandidateLast = 1 << 2
	// CandidateRoom is set at a promotion when level To has room for it, so that nothing goes for it.
	CandidateRoom = 1 << 3
)

// CandidateKind is what would become of a candidate that is admitted.
type CandidateKind uint8

const (
	KindNew       CandidateKind = 0 // an engine stores it, or level From has just got it and writes it through
	KindDemotion  CandidateKind = 1 // its level evicts it, and a farther one would keep it
	KindPromotion CandidateKind = 2 // it was loaded, and a nearer level would have a copy
)

// NoLevel is [Candidate].From of what an engine stores.
const NoLevel = 0xff

// PeerLevel is another host, behind all levels of this one: [Candidate].From of what it lends or offers, and To of what would be offered to it.
const PeerLevel = 0xfe

// FeatureLevels is the bit of Info.Features that says that candidates tell Kind, From, To and Hits.
const FeatureLevels = 1 << 1

// KeyBytes is the room for a key in place records; shorter keys are padded with zeros and KeyLen says how many count.
const KeyBytes = 32

// PlaceQuery asks kv_place for one piece's root and path. The host asks once for each piece and writes the answer down.
type PlaceQuery struct {
	Namespace uint32
	Group     uint32
	Rank      uint32
	KeyLen    uint32
	Size      uint32 // SizeUnit, the whole entry
	_         uint32
	Key       [KeyBytes]byte
}

// PlaceQuerySize is the stride of a [PlaceQuery].
const PlaceQuerySize = 56

// PlaceAnswer is one answer of kv_place, an array at the start of RESULT. Off counts from the start of RESULT and
// points at Len bytes of a relative path: 1 to 8 components of [A-Za-z0-9._=@+-], none starting with a dot, each at
// most 255 bytes, joined by '/', at most 1,024 bytes in all.
type PlaceAnswer struct {
	Root uint32 // index into the ROOTS records, or None for the host's choice
	Off  uint32
	Len  uint32
	_    uint32
}

// PlaceAnswerSize is the stride of a [PlaceAnswer].
const PlaceAnswerSize = 16

// RootsHeader starts the ROOTS buffer; Count records of Stride bytes follow at offset 8.
type RootsHeader struct {
	Count  uint32
	Stride uint32
}

// RootsHeaderSize is the size of a [RootsHeader].
const RootsHeaderSize = 8

// RootFacts are the live facts about one root. The host refreshes them now and then, not per call.
type RootFacts struct {
	ID       uint32
	Flags    uint32 // RootWritable
	Capacity uint64 // bytes
	Free     uint64 // bytes
	ReadBps  uint64 // measured bytes per second, 0 while unknown
	WriteBps uint64
}

// RootFactsSize is the stride of [RootFacts].
const RootFactsSize = 40

// RootWritable is set on a root that accepts stores.
const RootWritable = 1

// LayoutHeader starts kv_layout's ARGS; the call's n plane records follow at offset 16.
type LayoutHeader struct {
	Namespace uint32
	Group     uint32
	Blocks    uint32 // blocks in one chunk
	Planes    uint32 // equals the call's n
}

// LayoutHeaderSize is the size of a [LayoutHeader].
const LayoutHeaderSize = 16

// Plane is one stream of pages: a layer's K, its V, or both where the engine keeps them together.
type Plane struct {
	Layer     uint32
	Part      uint32 // 0 for K or a fused page, 1 for V, more for auxiliary caches
	PageBytes uint32 // bytes of one block's page
	_         uint32
}

// PlaneSize is the stride of a [Plane].
const PlaneSize = 16

// Segment is one record of a layout: for one plane, the byte range [PageOff, PageOff+PageLen) of the pages of Blocks
// consecutive blocks, laid out one after the other, preceded by Gap zero bytes (fewer than 4,096). A layout's segments,
// in order, make the payload; together they must cover each byte of each page exactly once.
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
