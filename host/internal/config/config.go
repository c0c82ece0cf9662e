package config

import (
	"maps"
	"slices"
	"time"
)

type Config struct {
	Socket string
	// SocketUsers and SocketGroups are numbers, separated by commas: see [IDs].
	SocketUsers, SocketGroups string

	PolicyDir string
	// PolicyCache is a directory for compiled policies; empty is off, CacheAuto the user's own.
	PolicyCache string
	// PolicyMemory bounds the memory of all policies' instances; 0 for a quarter of the machine's.
	PolicyMemory int64
	// MaxMemory bounds staging and what clients make the host hold; 0 for half of the machine's memory.
	MaxMemory int64

	PolicyCompile PolicyCompile

	Log      Log
	HTTP     HTTP
	OTLP     OTLP
	Policies []Policy
	Roots    []Root
	Tenants  []Tenant
	Expiries []Expiry
	// Compressions say for some namespaces what Store.Compression says for the rest; the first that matches counts.
	Compressions []Compression
	Store        Store
	Move         Move
	Engine       Engine
	GDS          GDS
	Session      Session
	Peers        Peers
}

// Peers are the other hosts that lend this one what they hold.
type Peers struct {
	Hosts         string // host:port of each, separated by commas: see List
	Listen        string // where this host lends; empty is nowhere
	Cert, Key, CA string // PEM files; empty: no TLS
	Deadline      time.Duration
	Bandwidth     int64  // most bytes a second that are lent; 0 for no limit
	Demote        bool   // to others and from them
	NIXL          string // a path, or auto; empty: gRPC alone
}

// PolicyCompile limits the child process that compiles a policy.
type PolicyCompile struct {
	Memory int64         // bytes
	CPU    time.Duration // processor time
	Time   time.Duration // elapsed
}

// Log is the level and format of the log.
type Log struct {
	Level  string // LevelDebug to LevelError
	Format string // FormatAuto, FormatText, FormatJSON
}

// Log levels and formats.
const (
	LevelDebug = "debug"
	LevelInfo  = "info"
	LevelWarn  = "warn"
	LevelError = "error"

	FormatAuto = "auto" // text on a terminal, JSON otherwise
	FormatText = "text"
	FormatJSON = "json"
)

// HTTP is the read-only listener for probes, metrics, the status and the page that shows it.
type HTTP struct {
	Listen    string // host:port; empty is off
	TLSCert   string // PEM file; empty: no TLS
	TLSKey    string
	TokenFile string // empty: no token is wanted
	Profiles  bool

	ReadyRoots    string // RootsAll, RootsAny, RootsNone
	ReadyPolicies bool   // a policy in quarantine makes the host not ready
	ReadyScan     bool   // a scan at the start does
}

// OTLP is where spans of requests go.
type OTLP struct {
	Endpoint    string // of the collector; empty is off
	HeadersFile string
	SampleRatio float64
	Timeout     time.Duration
}

// Which roots must be in service for a host to be ready.
const (
	RootsAll  = "all"
	RootsAny  = "any"
	RootsNone = "none"
)

// Policy is one wasm module and the roles it takes.
type Policy struct {
	Name   string            // what operators call it; see Label
	Module string            // path to a .wasm file, or the name of an embedded one
	Roles  []string          // a subset of the module's roles; empty for all of them
	Grants []string          // imports it may use beyond log and fail
	Config map[string]string // the policy's own settings, flattened with dots

	Levels     []int    // to which it admits what moves, as an admit policy
	Namespaces []string // patterns of those that admit, place and layout are for; empty for the rest
	Shadow     bool     // it decides nothing: it is judged on the live requests
	Capacity   int64    // bytes of a shadow's imaginary cache; 0 for what the roots have together

	SHA256      string // that the module must have, in hexadecimal; empty for any
	PublicKey   string // of minisign in base64, or of cosign in PEM, that must have signed the module; empty for none
	OnFault     string // OnFaultBuiltin (also when empty), OnFaultStop
	MemoryPages int64  // of 64 KiB, at most; 0 for 1,024 and 128 bytes for each slot
	Fuel        Fuel
}

// Fuel limits a policy's calls, at about a unit per instruction; 0 for the defaults.
type Fuel struct {
	Call   int64         // for each call
	Record int64         // on top, for each record of a batch
	Time   time.Duration // CPU time of a call that sessions wait for
}

// When the level behind a root gets what is stored there.
const (
	WriteBack    = "back"    // when it is about to leave
	WriteHits    = "hits"    // when it was loaded, too
	WriteThrough = "through" // at once
)

// What happens when a policy fails.
const (
	OnFaultBuiltin = "builtin"
	OnFaultStop    = "stop"
)

// Auto is the value of a size that the host chooses.
const Auto = -1

const autoText = "auto"

// CacheAuto stands for $XDG_CACHE_HOME/kvhost, or ~/.cache/kvhost.
const CacheAuto = "auto"

// Root holds pieces. Its path says where: see Kind.
type Root struct {
	Path     string
	Capacity int64  // bytes
	Level    int    // how far from the engines: 0 is nearest
	Write    string // when the next level gets what is stored: WriteHits, WriteThrough; empty: WriteBack
	Evict    string // label of the policy that evicts here; empty for the one that no root names
	Shared   bool   // other hosts use it too
	// RequireMount refuses the root while it is on the file system of /.
	RequireMount bool
	Route        string // RouteAuto, RouteDirect, RouteStaged

	// AsNeeded says that memory is allocated as chunks need it: see WithMemory. It is no key.
	AsNeeded bool
	// ForPieces says that the capacity is for pieces alone, and directories come on top: for replays, which count chunks. It
	// is no key.
	ForPieces bool

	part float64 // of its file system: what Capacity is made of, when it was loaded

	Endpoint  string // of a bucket: https://host; empty: of AWS
	Region    string // empty: as the environment says
	PathStyle bool   // the bucket is in the path of requests
	CAFile    string // certificates of who may sign the endpoint's; empty: the system's
	// Prices are what the bucket's server is paid; nil: not known.
	Prices []float64

	MinFree     Amount // left free on its file system; a percentage is of that
	DailyWrites int64  // bytes; 0: as many as come
}

// Routes of a root's pieces to and from GPUs.
const (
	RouteAuto   = "auto"
	RouteDirect = "direct"
	RouteStaged = "staged"
)

// Store is how roots evict, publish and are shared.
type Store struct {
	Memory      int64         // bytes of a root in memory before all others, or Auto: see MemoryBefore
	Durability  string        // DurabilityNone, DurabilityStrict
	Compression string        // CompressionOff, CompressionAuto, CompressionHuffman
	IOTimeout   time.Duration // 0: none
	Seed        int64
	HostID      string        // empty: from the machine's id
	SharedPoll  time.Duration // of roots that hosts share
	SharedLapse time.Duration
}

// Move bounds the copies between levels of roots.
type Move struct {
	Workers   int
	Bandwidth int64 // bytes per second; 0: no limit
	Waiting   time.Duration
	Shutdown  time.Duration
}

// What a publication waits for, and how chunks are stored.
const (
	DurabilityNone   = "none"
	DurabilityStrict = "strict"

	CompressionOff     = "off"
	CompressionAuto    = "auto"
	CompressionHuffman = "huffman"
)

// Engine is how bytes move.
type Engine struct {
	ThreadsPerGPU       int
	SlotBytes           int64
	MaxStagingMemory    int64
	ReadPreferringRatio float64
	MaxWriteQueue       time.Duration // 0: no limit
	DirectIO            bool
}

// GDS is how GPUs are used.
type GDS struct {
	CUDA       string
	CopyBlocks int

	UseCuFile        bool
	BufferMiB        int
	MaxConcurrentOps int
	HandleCache      int
	LogDir           string
}

// MayUseCuFile says whether libcufile may be loaded and has device memory to work with.
func (c *Config) MayUseCuFile() bool {
	return c.GDS.CUDA != CUDAOff && c.GDS.UseCuFile && c.GDS.BufferMiB > 0
}

// TriesDirect says whether the direct route between a root and the GPUs is tried at start.
func (c *Config) TriesDirect(r Root) bool {
	return c.MayUseCuFile() && r.Route != RouteStaged && r.Kind().HasDirectory()
}

// Values of GDS.CUDA.
const (
	CUDAAuto = "auto"
	CUDAOff  = "off"
)

// Session limits the clients.
type Session struct {
	LeaseTTL      time.Duration
	MaxWait       time.Duration
	IdleExit      time.Duration // 0: never
	MaxSessions   int
	MaxKeys       int
	MaxChunks     int
	MaxMessage    int64
	MaxRegistered int64             // bytes of client memory
	Pins          map[string]string // namespace fields that every session must have
}

// Default is the configuration without any settings: one root in the working directory, built-in policies.
func Default() *Config {
	c := &Config{Roots: []Root{{Path: defaultRoot, Capacity: defaultCapacity, Route: RouteAuto}}}
	for _, k := range keys {
		if err := k.set(c, k.Default); err != nil {
			panic("config: the table's own default: " + err.Error())
		}
	}
	return c
}

const (
	defaultRoot     = "kvhost-data"
	defaultCapacity = 10 << 30
)

// Capacity is that of all roots.
func (c *Config) Capacity() (sum int64) {
	for _, r := range c.Roots {
		sum += r.Capacity
	}
	return sum
}

// Clone is a copy that shares nothing.
func (c *Config) Clone() *Config {
	d := *c
	d.Roots = slices.Clone(c.Roots)
	d.Policies = slices.Clone(c.Policies)
	d.Session.Pins = maps.Clone(c.Session.Pins)
	for i := range d.Policies {
		p := &d.Policies[i]
		p.Roles, p.Grants, p.Config = slices.Clone(p.Roles), slices.Clone(p.Grants), maps.Clone(p.Config)
	}
	return &d
}
