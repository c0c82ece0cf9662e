package config

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// Config holds all settings: see [Key] for the tags.
type Config struct {
	Socket string `toml:"socket"`
	// SocketUsers and SocketGroups are lists of numbers separated by commas: see [IDs].
	SocketUsers  string `toml:"socket_users"`
	SocketGroups string `toml:"socket_groups"`

	PolicyDir string `toml:"policy_dir" reload:"yes"`
	// PolicyCache is a directory for compiled policies. Empty turns the cache off, and CacheAuto is the user's own cache
	// directory.
	PolicyCache string `toml:"policy_cache"`
	// PolicyMemory limits the memory of all policies' instances. 0 means a quarter of the machine's memory.
	PolicyMemory int64 `toml:"policy_memory" is:"size" reload:"yes"`
	// MaxMemory limits staging and the memory that clients make the host hold. 0 means half of the machine's memory.
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
	// Compressions override Store.Compression for some namespaces. The first that matches applies.
	Compressions []Compression `toml:"compression"`
}

// Peers configures the other hosts, which lend this one their entries.
type Peers struct {
	Hosts     string        `toml:"hosts"`  // list of host:port, separated by commas: see List
	Listen    string        `toml:"listen"` // address on which this host lends; empty if it lends nothing
	Cert      string        `toml:"cert"`   // PEM file, as are Key and CA; empty means no TLS
	Key       string        `toml:"key"`
	CA        string        `toml:"ca"`
	Deadline  time.Duration `toml:"deadline" min:"1ms" max:"10s"`
	Bandwidth int64         `toml:"bandwidth" is:"size"` // most bytes a second that are lent; 0 means no limit
	NIXL      string        `toml:"nixl"`                // path of the library, or auto; empty means gRPC alone
}

// Log configures the log.
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

// HTTP configures the read-only listener for probes, metrics, the status and its page.
type HTTP struct {
	Listen    string `toml:"listen"`   // host:port; empty turns it off
	TLSCert   string `toml:"tls_cert"` // PEM file; empty means no TLS
	TLSKey    string `toml:"tls_key"`
	TokenFile string `toml:"token_file"` // empty means that no token is required
	Profiles  bool   `toml:"profiles"`

	ReadyRoots string `toml:"ready_roots" one:"all any none"`
}

// OTLP configures the destination of the spans of requests.
type OTLP struct {
	Endpoint    string  `toml:"endpoint"` // URL of the collector; empty turns spans off
	HeadersFile string  `toml:"headers_file"`
	SampleRatio float64 `toml:"sample_ratio"`
}

// Values of HTTP.ReadyRoots: the roots that must be in service for the host to be ready.
const (
	RootsAll  = "all"
	RootsAny  = "any"
	RootsNone = "none"
)

// Policy configures one wasm module and its roles.
type Policy struct {
	Name   string `toml:"name,omitempty"` // name for the operator: see Label
	Module string `toml:"module"`         // path of a .wasm file, or name of an embedded module

	Namespaces []string `toml:"namespaces,omitempty"`         // patterns of the namespaces for the roles admit, place and layout; empty means all remaining ones
	Levels     []int    `toml:"levels,omitempty"`             // levels to which an admit policy admits moves
	Shadow     bool     `toml:"shadow,omitempty"`             // it decides nothing and is judged on the live requests
	Capacity   int64    `toml:"capacity,omitempty" is:"size"` // size of a shadow's imaginary cache; 0 means the capacity of all roots together
	Roles      []string `toml:"roles,omitempty"`              // subset of the module's roles; empty means all of them
	Grants     []string `toml:"grants,omitempty"`             // imports that it may use in addition to log and fail

	SHA256      string `toml:"sha256,omitempty"`     // required digest of the module in hexadecimal; empty means any
	PublicKey   string `toml:"public_key,omitempty"` // key that must have signed the module: of minisign in base64, or of cosign in PEM; empty means none
	OnFault     string `toml:"on_fault,omitempty"`   // OnFaultBuiltin or OnFaultStop; empty means OnFaultBuiltin
	MemoryPages int64  `toml:"memory_pages"`         // most pages of 64 KiB; 0 means 1,024, and 128 bytes for each slot
	Fuel        Fuel   `toml:"fuel"`

	Config map[string]string `toml:"config,omitempty"` // settings of the policy; names of nested tables are joined by dots
}

// Fuel limits the calls of a policy. A unit is about one instruction. 0 means the default.
type Fuel struct {
	Call   int64         `toml:"call"`   // for each call
	Record int64         `toml:"record"` // in addition for each record of a batch
	Time   time.Duration `toml:"time"`   // processor time of a call that sessions wait for
}

// Values of Root.Write: the time at which the next level gets a copy of a stored chunk.
const (
	WriteBack    = "back"    // when the chunk is about to leave the root
	WriteHits    = "hits"    // also when it was loaded
	WriteThrough = "through" // at once
)

// Values of Policy.OnFault: the consequence of a policy's fault.
const (
	OnFaultBuiltin = "builtin"
	OnFaultStop    = "stop"
)

// Auto stands for a size that the host chooses.
const Auto = -1

const autoText = "auto"

// CacheAuto stands for $XDG_CACHE_HOME/kvhost, or ~/.cache/kvhost.
const CacheAuto = "auto"

// Root configures a root, which holds pieces. The path determines its kind: see Kind.
type Root struct {
	Path  string `toml:"path"`
	Level int    `toml:"level"`                                     // distance from the engines; 0 is the nearest
	Write string `toml:"write" one:"back hits through" zero:"back"` // time at which the next level gets a copy of a stored chunk
	// Shared means that other hosts use the root, too.
	Shared bool `toml:"shared"`
	// RequireMount refuses the root while it is on the file system of /.
	RequireMount bool   `toml:"require_mount"`
	Route        string `toml:"route"` // RouteAuto, RouteDirect, RouteStaged

	// AsNeeded means that memory is allocated as chunks need it: see WithMemory. It is not a key.
	AsNeeded bool
	// ForPieces means that the capacity is for pieces alone, without directories. Replays need this because they count chunks.
	// It is not a key.
	ForPieces bool

	Endpoint  string `toml:"endpoint,omitempty"`   // endpoint of a bucket, https://host; empty means AWS
	Region    string `toml:"region,omitempty"`     // empty means the region in the environment
	PathStyle bool   `toml:"path_style,omitempty"` // requests have the bucket in their path
	CAFile    string `toml:"ca_file,omitempty"`    // certificates of the authorities that may sign the endpoint's certificate; empty means the system's

	Capacity    int64   `toml:"capacity" is:"size" reload:"yes"`
	part        float64 // part of the file system from which Capacity was computed
	Evict       string  `toml:"evict" reload:"yes"`                  // label of the evict policy; empty means the policy that no root names
	MinFree     Amount  `toml:"min_free" reload:"yes"`               // space to leave free on the file system; a percentage refers to the file system
	DailyWrites int64   `toml:"daily_writes" is:"size" reload:"yes"` // 0 means no limit
}

// Routes of a root's pieces to and from GPUs.
const (
	RouteAuto   = "auto"
	RouteDirect = "direct"
	RouteStaged = "staged"
)

// Store configures how roots evict, publish and are shared.
type Store struct {
	Memory      int64         `toml:"memory" is:"size" auto:"yes"` // size of a root in memory in front of all others: see MemoryBefore
	Durability  string        `toml:"durability" one:"none strict"`
	Compression string        `toml:"compression" one:"off auto huffman"`
	IOTimeout   time.Duration `toml:"io_timeout"`            // 0 means no limit
	HostID      string        `toml:"host_id"`               // empty means an id derived from the machine's
	SharedPoll  time.Duration `toml:"shared_poll" min:"1ms"` // interval at which hosts that share a root read each other's records
	SharedLapse time.Duration `toml:"shared_lapse" min:"4ms"`
}

// Move bounds the copies between levels of roots.
type Move struct {
	Workers int `toml:"workers" min:"1" max:"64"`
	// Bandwidth is in bytes per second. 0 means no limit. With 2 GiB/s for copies, a disk of 1.7 GB/s keeps up with the stores
	// of engines: BenchmarkNextLife.
	Bandwidth int64         `toml:"bandwidth" is:"size"`
	Shutdown  time.Duration `toml:"shutdown"`
}

// Values of Store.Durability and Store.Compression.
const (
	DurabilityNone   = "none"
	DurabilityStrict = "strict"

	CompressionOff     = "off"
	CompressionAuto    = "auto"
	CompressionHuffman = "huffman"
)

// Engine configures the transfer of bytes.
type Engine struct {
	// ThreadsPerGPU is 24 by default. On an H200 with 16 cores, 24 workers loaded 4 to 20 % more than 16 workers, and 15 to
	// 20 % more with compression. They stored as much. 32 workers loaded no more (host/docs/lab).
	ThreadsPerGPU    int   `toml:"threads_per_gpu" min:"1" max:"1024"`
	SlotBytes        int64 `toml:"slot_bytes" is:"size" min:"1MiB" max:"1GiB"`
	MaxStagingMemory int64 `toml:"max_staging_memory" is:"size" auto:"yes" min:"1MiB"` // Auto is resolved by host.OnMachine
	DirectIO         bool  `toml:"direct_io"`
}

// GDS configures the use of GPUs.
type GDS struct {
	CUDA string `toml:"cuda" one:"auto off"`

	MaxDeviceMemory int64 `toml:"max_device_memory" is:"size"` // for the direct route; 0 means that everything is staged
}

// MayUseCuFile reports whether libcufile may be loaded and has device memory to work with.
func (c *Config) MayUseCuFile() bool {
	return c.GDS.CUDA != CUDAOff && c.GDS.MaxDeviceMemory > 0
}

// TriesDirect reports whether the direct route between a root and the GPUs is tried at the start.
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
	IdleExit      time.Duration     `toml:"idle_exit"`                // 0 means never
	MaxSessions   int               `toml:"max_sessions"`             // 0 is resolved by host.OnMachine
	MaxRegistered int64             `toml:"max_registered" is:"size"` // client memory in bytes
	Pins          map[string]string // required values of namespace fields
}

var defaults = sync.OnceValue(func() *Config {
	l := &Loaded{Origins: map[string]Origin{}}
	if err := l.applyText("kvhost.toml", example); err != nil {
		panic("config: the example file: " + err.Error())
	}
	return &l.Config
})

// Default returns the configuration without any settings, which is that of the example file.
func Default() *Config { return defaults().Clone() }

// Capacity returns the capacity of all roots together.
func (c *Config) Capacity() (sum int64) {
	for _, r := range c.Roots {
		sum += r.Capacity
	}
	return sum
}

// Clone returns a deep copy.
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
