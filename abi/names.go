package abi

// Version is the ABI's major version. A module of another version is refused by its marker export.
const Version = 1

// Names of a module's exports. Roles are recognised by the exports that are present: see [Role.Exports].
const (
	ExportMarker     = "kvhost_abi_1" // func (): found by scanning the export section, never called
	ExportMemory     = "memory"
	ExportInitialize = "_initialize"  // func (): optional, called once before anything else
	ExportBuffer     = "kv_buffer"    // func (kind, len i32) -> ptr i32
	ExportInit       = "kv_init"      // func (info_len i32) -> status i32
	ExportNamespace  = "kv_namespace" // func (id, len i32) -> status i32
	ExportEvents     = "kv_events"    // func (n, stride i32) -> status i32
	ExportStep       = "kv_step"      // func (n, stride i32) -> status<<32|victims i64
	ExportAdmit      = "kv_admit"     // func (n, stride i32) -> status<<32|answers i64
	ExportPlace      = "kv_place"     // func (n, stride i32) -> status<<32|answers i64
	ExportLayout     = "kv_layout"    // func (n, stride i32) -> status<<32|segments i64
	ExportSave       = "kv_save"      // func (limit i32) -> status<<32|bytes i64
	ExportLoad       = "kv_load"      // func (len i32) -> status i32
)

// Modules and functions that a guest may import.
const (
	ImportModule     = "kvhost_1"
	ImportLogEnabled = "log_enabled" // func (level i32) -> i32: always granted
	ImportLog        = "log"         // func (level, ptr, len i32): always granted
	ImportFail       = "fail"        // func (ptr, len i32): always granted; text for the next negative status or trap
	ImportNow        = "now_ns"      // func () -> i64: grant "clock"; frozen per batch
	ImportCounterAdd = "counter_add" // func (id i32, delta i64): grant "metrics"
	ImportRand       = "rand_u64"    // func () -> i64: grant "random"; seeded by the host
	ImportWASI       = "wasi_snapshot_preview1"
)

// ManifestSection is the custom section that holds a module's [Manifest] as JSON.
const ManifestSection = "kvhost.manifest"

// Buffer kinds, which are the first argument of kv_buffer. The pointer of a kind stays valid until kv_buffer is called
// for that kind again. The host does so at init and when it needs more room, but not for each call.
const (
	BufferInfo   = 0 // kv_init, kv_namespace
	BufferEvents = 1 // kv_events, kv_step
	BufferArgs   = 2 // kv_step's Ask; kv_admit, kv_place, kv_layout
	BufferResult = 3 // every answer
	BufferRoots  = 4 // RootFacts for kv_place; a guest may return 0 if it does not choose roots
	BufferState  = 5 // kv_save, kv_load
	BufferKinds  = 6
)

// Status is the outcome of a guest call. Zero means success. A positive status asks the host to use its default for
// this call. A negative status is a fault, after which the host drops the instance.
type Status int32

const (
	StatusOK       Status = 0
	StatusDefault  Status = 1  // no answer, so the host's default applies
	StatusBadInput Status = -1 // the guest cannot read an argument (unknown stride or namespace)
	StatusNoSpace  Status = -2 // the guest has no room for its input
	StatusInternal Status = -3 // the guest detected an inconsistency
)

// Pack combines a status and a count to the i64 result of calls that answer with records.
func Pack(s Status, count uint32) uint64 { return uint64(uint32(s))<<32 | uint64(count) }

// Unpack splits the i64 result of a call.
func Unpack(r uint64) (Status, uint32) { return Status(int32(uint32(r >> 32))), uint32(r) }

// Log levels of the log imports.
const (
	LevelDebug = 0
	LevelInfo  = 1
	LevelWarn  = 2
	LevelError = 3
)

// None stands for an absent slot (no resident parent), an absent root (the host chooses) or any tenant (in [Ask]).
const None uint32 = 0xffffffff

// SizeUnit is the unit of every size field that is a u32: 4 KiB.
const SizeUnit = 4096
