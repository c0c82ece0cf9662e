package config

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// Config is all that can be set: see [Key] for the tags.
type Config struct {
	Socket string `toml:"socket"`
	// SocketUsers and SocketGroups are numbers, separated by commas: see [IDs].
	SocketUsers  string `toml:"socket_users"`
	SocketGroups string `toml:"socket_groups"`

	PolicyDir string `toml:"policy_dir" reload:"yes"`
	// PolicyCache is a directory for compiled policies; empty is off, CacheAuto the user's own.
	PolicyCache string `toml:"policy_cache"`
	// PolicyMemory bounds the memory of all policies' instances; 0 for a quarter of the machine's.
	PolicyMemory int64 `toml:"policy_memory" is:"size" reload:"yes"`
	// MaxMemory bounds staging and what clients make the host hold; 0 for half of the machine's memory.
	MaxMemory int64 `toml:"max_memory" is:"size"`

	Log     Log     `toml:"log"`
	HTTP    HTTP    `toml:"http"`
	OTLP    OTLP    `toml:"otlp"`
	Store   Store   `toml:"store"`
	Move    Move    `toml:"move"`
	Engine  Engine  `toml:"engine"`
	GDS     GDS     `toml:"gds"`
	Session Session `toml:"session"`
	Peers   Peers   `toml:"peers"`

	Policies []Policy `toml:"policy" reload:"yes"`
	Roots    []Root   `toml:"root"`
	Tenants  []Tenant `toml:"tenant" reload:"yes"`
	Expiries []Expiry `toml:"expiry"`
	// Compressions say for some namespaces what Store.Compression says for the rest; the first that matches counts.
	Compressions []Compression `toml:"compression"`
}

// Peers are the other hosts that lend this one what they hold.
type Peers struct {
	Hosts     string        `toml:"hosts"`  // host:port of each, separated by commas: see List
	Listen    string        `toml:"listen"` // where this host lends; empty is nowhere
	Cert      string        `toml:"cert"`   // a PEM file, as Key and CA; empty: no TLS
	Key       string        `toml:"key"`
	CA        string        `toml:"ca"`
	Deadline  time.Duration `toml:"deadline" min:"1ms" max:"10s"`
	Bandwidth int64         `toml:"bandwidth" is:"size"` // most bytes a second that are lent; 0 for no limit
	NIXL      string        `toml:"nixl"`                // a path, or auto; empty: gRPC alone
}

// Log is the level and format of the log.
type Log struct {
	Level  string `toml:"level" one:"debug info warn error" reload:"yes"`
	Format string `toml:"format" one:"auto text json"`
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
	Listen    string `toml:"listen"`   // host:port; empty is off
	TLSCert   string `toml:"tls_cert"` // PEM file; empty: no TLS
	TLSKey    string `toml:"tls_key"`
	TokenFile string `toml:"token_file"` // empty: no token is wanted
	Profiles  bool   `toml:"profiles"`

	ReadyRoots string `toml:"ready_roots" one:"all any none"`
}

// OTLP is where spans of requests go.
type OTLP struct {
	Endpoint    string  `toml:"endpoint"` // of the collector; empty is off
	HeadersFile string  `toml:"headers_file"`
	SampleRatio float64 `toml:"sample_ratio"`
}

// Which roots must be in service for a host to be ready.
const (
	RootsAll  = "all"
	RootsAny  = "any"
	RootsNone = "none"
)

// Policy is one wasm module and the roles it takes.
type Policy struct {
	Name   string `toml:"name,omitempty"` // what operators call it; see Label
	Module string `toml:"module"`         // path to a .wasm file, or the name of an embedded one

	Namespaces []string `toml:"namespaces,omitempty"`         // patterns of those that admit, place and layout are for; empty for the rest
	Levels     []int    `toml:"levels,omitempty"`             // to which it admits what moves, as an admit policy
	Shadow     bool     `toml:"shadow,omitempty"`             // it decides nothing: it is judged on the live requests
	Capacity   int64    `toml:"capacity,omitempty" is:"size"` // of a shadow's imaginary cache; 0 for what the roots have together
	Roles      []string `toml:"roles,omitempty"`              // a subset of the module's roles; empty for all of them
	Grants     []string `toml:"grants,omitempty"`             // imports it may use beyond log and fail

	SHA256      string `toml:"sha256,omitempty"`     // that the module must have, in hexadecimal; empty for any
	PublicKey   string `toml:"public_key,omitempty"` // of minisign in base64, or of cosign in PEM, that must have signed the module; empty for none
	OnFault     string `toml:"on_fault,omitempty"`   // OnFaultBuiltin (also when empty), OnFaultStop
	MemoryPages int64  `toml:"memory_pages"`         // of 64 KiB, at most; 0 for 1,024 and 128 bytes for each slot
	Fuel        Fuel   `toml:"fuel"`

	Config map[string]string `toml:"config,omitempty"` // the policy's own settings, flattened with dots
}

// Fuel limits a policy's calls, at about a unit per instruction; 0 for the defaults.
type Fuel struct {
	Call   int64         `toml:"call"`   // for each call
	Record int64         `toml:"record"` // on top, for each record of a batch
	Time   time.Duration `toml:"time"`   // of the processor, for a call that sessions wait for
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
	Path  string `toml:"path"`
	Level int    `toml:"level"`                                     // how far from the engines: 0 is nearest
	Write string `toml:"write" one:"back hits through" zero:"back"` // when the next level gets what is stored
	// Shared says that other hosts use it, too.
	Shared bool `toml:"shared"`
	// RequireMount refuses the root while it is on the file system of /.
	RequireMount bool   `toml:"require_mount"`
	Route        string `toml:"route"` // RouteAuto, RouteDirect, RouteStaged

	// AsNeeded says that memory is allocated as chunks need it: see WithMemory. It is no key.
	AsNeeded bool
	// ForPieces says that the capacity is for pieces alone, and directories come on top: for replays, which count chunks. It
	// is no key.
	ForPieces bool

	Endpoint  string `toml:"endpoint,omitempty"`   // of a bucket: https://host; empty: of AWS
	Region    string `toml:"region,omitempty"`     // empty: as the environment says
	PathStyle bool   `toml:"path_style,omitempty"` // the bucket is in the path of requests
	CAFile    string `toml:"ca_file,omitempty"`    // certificates of who may sign the endpoint's; empty: the system's

	Capacity    int64   `toml:"capacity" is:"size" reload:"yes"`
	part        float64 // of its file system: what Capacity is made of, when it was loaded
	Evict       string  `toml:"evict" reload:"yes"`                  // label of the policy that evicts here; empty for the one that no root names
	MinFree     Amount  `toml:"min_free" reload:"yes"`               // left free on its file system; a percentage is of that
	DailyWrites int64   `toml:"daily_writes" is:"size" reload:"yes"` // 0: as many as come
}

// Routes of a root's pieces to and from GPUs.
const (
	RouteAuto   = "auto"
	RouteDirect = "direct"
	RouteStaged = "staged"
)

// Store is how roots evict, publish and are shared.
type Store struct {
	Memory      int64         `toml:"memory" is:"size" auto:"yes"` // of a root in memory before all others: see MemoryBefore
	Durability  string        `toml:"durability" one:"none strict"`
	Compression string        `toml:"compression" one:"off auto huffman"`
	IOTimeout   time.Duration `toml:"io_timeout"`            // 0: none
	HostID      string        `toml:"host_id"`               // empty: from the machine's id
	SharedPoll  time.Duration `toml:"shared_poll" min:"1ms"` // of roots that hosts share
	SharedLapse time.Duration `toml:"shared_lapse" min:"4ms"`
}

// Move bounds the copies between levels of roots.
type Move struct {
	Workers int `toml:"workers" min:"1" max:"64"`
	// Bandwidth is bytes per second; 0: no limit. A disk of 1.7 GB/s keeps what engines store where copies may take 2 GiB/s:
	// BenchmarkNextLife.
	Bandwidth int64         `toml:"bandwidth" is:"size"`
	Shutdown  time.Duration `toml:"shutdown"`
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
	// ThreadsPerGPU is 24: on an H200 with 16 cores, 24 workers loaded 4 to 20 % more than 16, with compression 15 to 20 %,
	// and stored as much. 32 load no more (host/docs/lab).
	ThreadsPerGPU    int   `toml:"threads_per_gpu" min:"1" max:"1024"`
	SlotBytes        int64 `toml:"slot_bytes" is:"size" min:"1MiB" max:"1GiB"`
	MaxStagingMemory int64 `toml:"max_staging_memory" is:"size" auto:"yes" min:"1MiB"` // Auto: as host.OnMachine says
	DirectIO         bool  `toml:"direct_io"`
}

// GDS is how GPUs are used.
type GDS struct {
	CUDA string `toml:"cuda" one:"auto off"`

	MaxDeviceMemory int64 `toml:"max_device_memory" is:"size"` // for the direct route; 0: everything is staged
}

// MayUseCuFile says whether libcufile may be loaded and has device memory to work with.
func (c *Config) MayUseCuFile() bool {
	return c.GDS.CUDA != CUDAOff && c.GDS.MaxDeviceMemory > 0
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
	LeaseTTL      time.Duration     `toml:"lease_ttl" min:"1ms"`
	MaxWait       time.Duration     `toml:"max_wait" min:"1ms"`
	IdleExit      time.Duration     `toml:"idle_exit"`                // 0: never
	MaxSessions   int               `toml:"max_sessions"`             // 0: as host.OnMachine says
	MaxRegistered int64             `toml:"max_registered" is:"size"` // of client memory
	Pins          map[string]string // namespace fields that every session must have
}

var defaults = sync.OnceValue(func() *Config {
	l := &Loaded{Origins: map[string]Origin{}}
	if err := l.applyText("kvhost.toml", example); err != nil {
		panic("config: the example file: " + err.Error())
	}
	return &l.Config
})

// Default is the configuration without any settings: that of the example file.
func Default() *Config { return defaults().Clone() }

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
