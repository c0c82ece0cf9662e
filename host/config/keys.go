package config

// Kind is the type of a key's value.
type Kind uint8

const (
	Text     Kind = iota
	Choice        // one of Key.Choices
	Size          // bytes
	Duration      // time
	Count         // a whole number
	Ratio         // 0 to 1
	Flag          // true or false
)

func (k Kind) String() string {
	return [...]string{"text", "choice", "size", "duration", "whole number", "ratio", "true or false"}[k]
}

// Key is one row of the table: one scalar setting.
type Key struct {
	Section string // "" for the top level
	Name    string
	Kind    Kind
	Choices []string
	Default string // as it would be written in the environment
	Unit    string // what the value counts, where the kind does not say it
	Help    string // a sentence or two, without the default
	Min     int64  // of a Size, Count or Duration (nanoseconds)
	Max     int64  // 0 for none

	field func(*Config) any
}

// Path is the key's full name: section.name.
func (k *Key) Path() string {
	if k.Section == "" {
		return k.Name
	}
	return k.Section + "." + k.Name
}

// Keys are the scalar keys in the order of the example file. The slice is the package's.
func Keys() []*Key { return keys }

// keys is the table.
var keys = []*Key{
	{Name: "socket", Kind: Text, Default: "kvhost.sock",
		Help:  "Unix socket that clients connect to, created with mode 0600. File descriptors pass through a second one beside it, with the suffix \".fd\".",
		field: func(c *Config) any { return &c.Socket }},
	{Name: "policy_dir", Kind: Text,
		Help:  "Directory where policy names are looked up before the embedded ones. Empty: embedded ones only.",
		field: func(c *Config) any { return &c.PolicyDir }},
	{Name: "policy_cache", Kind: Text, Default: CacheAuto,
		Help:  "Directory that keeps compiled policies, so that a start takes milliseconds where compiling takes a second. It must belong to the user of the host, with mode 0700: what is in it is run. auto is $XDG_CACHE_HOME/kvhost or ~/.cache/kvhost. Empty: off.",
		field: func(c *Config) any { return &c.PolicyCache }},

	{Section: "log", Name: "level", Kind: Choice, Choices: []string{LevelDebug, LevelInfo, LevelWarn, LevelError}, Default: LevelInfo,
		Help:  "Least severe level that is logged. SIGUSR2 switches a running host between debug and this level.",
		field: func(c *Config) any { return &c.Log.Level }},
	{Section: "log", Name: "format", Kind: Choice, Choices: []string{FormatAuto, FormatText, FormatJSON}, Default: FormatAuto,
		Help:  "Form of a log line. auto is text on a terminal and JSON otherwise.",
		field: func(c *Config) any { return &c.Log.Format }},

	{Section: "http", Name: "listen", Kind: Text, Default: "127.0.0.1:9476", Unit: "host:port",
		Help:  "Loopback address of the read-only /healthz and /metrics. Empty: off.",
		field: func(c *Config) any { return &c.HTTP.Listen }},

	{Section: "store", Name: "evict", Kind: Choice, Choices: []string{EvictOnDemand, EvictBackground}, Default: EvictOnDemand,
		Help:  "When room is made: on-demand, as a store needs it and no more; background, down to low_watermark whenever high_watermark is passed.",
		field: func(c *Config) any { return &c.Store.Evict }},
	{Section: "store", Name: "high_watermark", Kind: Ratio, Default: "0.95", Unit: "of a root's capacity",
		Help:  "Fill at which background eviction starts.",
		field: func(c *Config) any { return &c.Store.HighWatermark }},
	{Section: "store", Name: "low_watermark", Kind: Ratio, Default: "0.9", Unit: "of a root's capacity",
		Help:  "Fill at which background eviction stops.",
		field: func(c *Config) any { return &c.Store.LowWatermark }},
	{Section: "store", Name: "evict_patience", Kind: Duration, Default: "5s", Min: 1e6,
		Help:  "How long a store that finds no space waits for background eviction before it is shed.",
		field: func(c *Config) any { return &c.Store.EvictPatience }},
	{Section: "store", Name: "durability", Kind: Choice, Choices: []string{DurabilityNone, DurabilityBatch, DurabilityStrict}, Default: DurabilityNone,
		Help:  "What a publication waits for: none, nothing (a crash can lose chunks, never serve wrong ones); batch, a sync shared by many; strict, its own.",
		field: func(c *Config) any { return &c.Store.Durability }},
	{Section: "store", Name: "io_timeout", Kind: Duration, Default: "30s",
		Help:  "How long one operation on a root's files may take. Then its blocks fail, and the root is taken out until it answers again. 0s: as long as it likes.",
		field: func(c *Config) any { return &c.Store.IOTimeout }},
	{Section: "store", Name: "host_id", Kind: Text,
		Help:  "Name of this host among those that share a root, 1 to 32 of a-z and 0-9: no two may have the same. Empty: made from the machine's id, which is enough where each machine runs one host.",
		field: func(c *Config) any { return &c.Store.HostID }},
	{Section: "store", Name: "shared_poll", Kind: Duration, Default: "1s", Min: 1e6,
		Help:  "How soon the hosts of a shared root see what others have stored and evicted.",
		field: func(c *Config) any { return &c.Store.SharedPoll }},
	{Section: "store", Name: "shared_lapse", Kind: Duration, Default: "10s", Min: 4e6,
		Help:  "How long a host of a shared root can be silent before the others give it up, at least four polls. Attributes that the mount caches must be fresh well within it.",
		field: func(c *Config) any { return &c.Store.SharedLapse }},
	{Section: "store", Name: "seed", Kind: Count, Default: "1",
		Help:  "Seed of policies that draw lots. The same seed and requests give the same decisions.",
		field: func(c *Config) any { return &c.Store.Seed }},

	// On an H200 with 16 cores, 24 and 32 workers moved up to a twentieth more to and from tmpfs and no more through the page
	// cache, took a tenth more of the processor, and let the first layer of a load wait half as long again (gds/BENCHMARKS.md).
	{Section: "engine", Name: "threads_per_gpu", Kind: Count, Default: "16", Unit: "threads", Min: 1, Max: 1024,
		Help:  "Workers that copy and do file I/O, per GPU, or for all host memory together: about as many as there are processors for them.",
		field: func(c *Config) any { return &c.Engine.ThreadsPerGPU }},
	{Section: "engine", Name: "slot_bytes", Kind: Size, Default: "4MiB", Min: 1 << 20, Max: 1 << 30,
		Help:  "Size of one staging slot, a multiple of 4KiB: the most that one read or write moves.",
		field: func(c *Config) any { return &c.Engine.SlotBytes }},
	{Section: "engine", Name: "max_staging_memory", Kind: Size, Default: "512MiB", Min: 1 << 20,
		Help:  "Most memory that all staging slots take together. It is taken in huge pages when the machine has as many set aside (vm.nr_hugepages), and near the GPUs where it has several NUMA nodes.",
		field: func(c *Config) any { return &c.Engine.MaxStagingMemory }},
	{Section: "engine", Name: "read_preferring_ratio", Kind: Ratio, Default: "0.75", Unit: "of the turns",
		Help:  "What loads get of the workers' turns while both loads and stores wait. With 0 or 1 one kind runs only when the other has none.",
		field: func(c *Config) any { return &c.Engine.ReadPreferringRatio }},
	{Section: "engine", Name: "max_write_queue", Kind: Duration, Default: "10s",
		Help:  "How long a store may wait for a worker. One that has waited longer is shed, and its blocks are free again. Loads are never shed. 0s: as long as it must.",
		field: func(c *Config) any { return &c.Engine.MaxWriteQueue }},
	{Section: "engine", Name: "direct_io", Kind: Flag, Default: "true",
		Help:  "Bypass the page cache (O_DIRECT) where the file system takes it.",
		field: func(c *Config) any { return &c.Engine.DirectIO }},

	{Section: "gds", Name: "cuda", Kind: Choice, Choices: []string{CUDAAuto, CUDAOff}, Default: CUDAAuto,
		Help:  "Whether GPUs are used: auto, those that the driver shows when it is there; off, none, and clients register host memory only.",
		field: func(c *Config) any { return &c.GDS.CUDA }},
	// With 8 for 16 workers the bus stood idle while workers waited for a thread.
	{Section: "gds", Name: "copy_threads", Kind: Count, Default: "16", Unit: "threads", Min: 1, Max: 1024,
		Help:  "Threads per GPU that start copies and wait for them: one for each worker, or workers wait for each other.",
		field: func(c *Config) any { return &c.GDS.CopyThreads }},
	{Section: "gds", Name: "copy_blocks", Kind: Count, Default: "32", Unit: "thread blocks", Min: 1, Max: 4096,
		Help:  "Most thread blocks of all copy kernels together on a GPU: what the engine's compute gives up while pages move. A kernel on a window takes half, for some ten microseconds.",
		field: func(c *Config) any { return &c.GDS.CopyBlocks }},
	{Section: "gds", Name: "windows", Kind: Flag, Default: "true",
		Help:  "Whether each copy thread has engine.slot_bytes of device memory, at most 16MiB, in which the GPU makes the checksums of what is staged. Without, the processor makes them, and loads and stores are slower.",
		field: func(c *Config) any { return &c.GDS.Windows }},
	{Section: "gds", Name: "use_cufile", Kind: Flag, Default: "true",
		Help:  "Whether libcufile may be loaded, for the direct route. Where it is missing or does not work, everything is staged.",
		field: func(c *Config) any { return &c.GDS.UseCuFile }},
	{Section: "gds", Name: "buffer_mib", Kind: Count, Default: "1024", Unit: "MiB", Max: 1 << 20,
		Help:  "Device memory of each GPU that the direct route may take, as far as it needs it: each of threads_per_gpu files under way stands there whole. What finds no room is staged. 0: nothing goes the direct route.",
		field: func(c *Config) any { return &c.GDS.BufferMiB }},
	{Section: "gds", Name: "max_concurrent_ops", Kind: Count, Default: "16", Unit: "operations", Min: 1, Max: 1024,
		Help:  "Most cuFile operations under way on a GPU, each on a thread of its own.",
		field: func(c *Config) any { return &c.GDS.MaxConcurrentOps }},
	{Section: "gds", Name: "submit", Kind: Choice, Choices: []string{SubmitAuto, SubmitSync, SubmitAsync}, Default: SubmitAuto,
		Help:  "How cuFile is asked: sync, cuFileRead and cuFileWrite; async, the calls that are queued on a stream; auto, whichever was quicker when the root was tried at start.",
		field: func(c *Config) any { return &c.GDS.Submit }},
	{Section: "gds", Name: "handle_cache", Kind: Count, Default: "256", Unit: "files", Max: 1 << 16,
		Help:  "Files that stay registered with cuFile while they are not in use. Each takes a descriptor.",
		field: func(c *Config) any { return &c.GDS.HandleCache }},
	{Section: "gds", Name: "log_dir", Kind: Text,
		Help:  "Directory for cuFile's own log. Empty: the socket's.",
		field: func(c *Config) any { return &c.GDS.LogDir }},

	{Section: "session", Name: "lease_ttl", Kind: Duration, Default: "1m0s", Min: 1e6,
		Help:  "How long a lookup's hits stay pinned when no load and no release follows.",
		field: func(c *Config) any { return &c.Session.LeaseTTL }},
	{Section: "session", Name: "max_sessions", Kind: Count, Default: "1024", Unit: "sessions", Min: 1,
		Help:  "Most clients connected at a time.",
		field: func(c *Config) any { return &c.Session.MaxSessions }},
	{Section: "session", Name: "max_keys", Kind: Count, Default: "65536", Unit: "keys", Min: 1, Max: 1 << 24,
		Help:  "Most keys in one lookup.",
		field: func(c *Config) any { return &c.Session.MaxKeys }},
	{Section: "session", Name: "max_chunks", Kind: Count, Default: "4096", Unit: "chunks", Min: 1, Max: 1 << 20,
		Help:  "Most chunks in one load or store.",
		field: func(c *Config) any { return &c.Session.MaxChunks }},
	{Section: "session", Name: "max_message", Kind: Size, Default: "16MiB", Min: 64 << 10, Max: 1 << 30,
		Help:  "Largest message taken from a client.",
		field: func(c *Config) any { return &c.Session.MaxMessage }},
	{Section: "session", Name: "max_memory", Kind: Size, Default: "0", Unit: "0 for the built-in limit of 8TiB",
		Help:  "Most client memory that all sessions together may register.",
		field: func(c *Config) any { return &c.Session.MaxMemory }},
}

// Keys of the array tables, for errors and the example file.
var (
	policyKeys = []string{"name", "module", "namespaces", "shadow", "capacity", "roles", "grants", "sha256", "public_key", "on_fault", "memory_pages", "fuel", "config"}
	rootKeys   = []string{"path", "capacity", "evict", "shared", "route", "min_free", "daily_writes"}
	tenantKeys = []string{"id", "quota"}
	expiryKeys = []string{"model", "ttl"}

	arrays = []string{"policy", "root", "tenant", "expiry"}
)

var byPath = func() map[string]*Key {
	m := make(map[string]*Key, len(keys))
	for _, k := range keys {
		m[k.Path()] = k
	}
	return m
}()

// Find is the key of a path such as "log.level".
func Find(path string) (*Key, bool) {
	k, ok := byPath[path]
	return k, ok
}

// sections are the tables of scalar keys in order.
func sections() []string {
	var out []string
	for _, k := range keys {
		if k.Section != "" && (len(out) == 0 || out[len(out)-1] != k.Section) {
			out = append(out, k.Section)
		}
	}
	return out
}
