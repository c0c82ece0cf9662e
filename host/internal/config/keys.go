package config

import (
	"time"
)

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
	Reload  bool // SIGHUP changes it; else it needs a restart
	Kind    Kind
	Choices []string
	Default string // as it would be written in the environment
	Unit    string // what the value counts, where the kind does not say it
	Help    string // a sentence or two, without the default
	Auto    bool   // a Size that may be auto, which is kept as [Auto]
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

var keys = []*Key{
	{Name: "socket", Kind: Text, Default: "kvhost.sock",
		Help: "Unix socket for clients, created with mode 0600. A second one, with the suffix \".fd\", " +
			"passes file descriptors.",
		field: func(c *Config) any { return &c.Socket }},
	{Name: "socket_users", Kind: Text, Unit: "numbers, separated by commas",
		Help: "Users that may connect, besides root, the host's own user and those of tenants (uids in " +
			"[[tenant]]). With any, the sockets have mode 0666 and each connection's user is checked.",
		field: func(c *Config) any { return &c.SocketUsers }},
	{Name: "socket_groups", Kind: Text, Unit: "numbers, separated by commas",
		Help:  "Groups that may connect.",
		field: func(c *Config) any { return &c.SocketGroups }},
	{Name: "policy_dir", Reload: true, Kind: Text,
		Help:  "Directory that is searched for policies by name before the embedded ones. Empty: embedded ones only.",
		field: func(c *Config) any { return &c.PolicyDir }},
	{Name: "policy_cache", Kind: Text, Default: CacheAuto,
		Help: "Directory for compiled policies: with it a start takes milliseconds instead of a second. kvhost runs " +
			"what is in it, so only the host's user may write to it. auto: " +
			"$XDG_CACHE_HOME/kvhost, or ~/.cache/kvhost. Empty: off.",
		field: func(c *Config) any { return &c.PolicyCache }},
	{Name: "policy_memory", Reload: true, Kind: Size, Default: "0", Unit: "0 for a quarter of the machine's memory",
		Help: "Most memory of all instances of policies together, charged as they grow. An instance that gets no " +
			"more usually fails, and the built-in policy answers for it.",
		field: func(c *Config) any { return &c.PolicyMemory }},

	{Name: "max_memory", Kind: Size, Default: "0", Unit: "0 for half of the machine's memory",
		Help: "Most memory of the host for staging and for what clients make it hold: sessions, messages, jobs, leases, " +
			"tables. An eighth of what staging leaves is for messages on their way. Half of the rest is set aside, the same " +
			"for each of session.max_sessions; the other half can be borrowed. Not in it: policies (policy_memory), the index, and roots in memory.",
		field: func(c *Config) any { return &c.MaxMemory }},

	{Section: "policy_compile", Name: "memory", Reload: true, Kind: Size, Default: "2GiB", Min: 64 << 20, Max: 1 << 40,
		Help: "Most memory of the child process that compiles a policy. A policy that needs more is refused. The " +
			"embedded ones need less than 200 MiB.",
		field: func(c *Config) any { return &c.PolicyCompile.Memory }},
	{Section: "policy_compile", Name: "cpu", Reload: true, Kind: Duration, Default: "1m", Min: int64(time.Second), Max: int64(time.Hour),
		Help:  "Most processor time of that process, in whole seconds. The embedded policies need less than 2s.",
		field: func(c *Config) any { return &c.PolicyCompile.CPU }},
	{Section: "policy_compile", Name: "time", Reload: true, Kind: Duration, Default: "5m", Min: int64(time.Second),
		Max:   int64(24 * time.Hour),
		Help:  "Most time that may pass until it has finished.",
		field: func(c *Config) any { return &c.PolicyCompile.Time }},

	{Section: "log", Name: "level", Reload: true, Kind: Choice, Choices: []string{LevelDebug, LevelInfo, LevelWarn, LevelError},
		Default: LevelInfo,
		Help:    "Least severe level to log.",
		field:   func(c *Config) any { return &c.Log.Level }},
	{Section: "log", Name: "format", Kind: Choice, Choices: []string{FormatAuto, FormatText, FormatJSON},
		Default: FormatAuto,
		Help:    "Format of log lines. auto: text on a terminal, JSON otherwise.",
		field:   func(c *Config) any { return &c.Log.Format }},

	{Section: "http", Name: "listen", Kind: Text, Default: "127.0.0.1:9476", Unit: "host:port",
		Help: "Address of the probes, /metrics, /status and the page that shows it, all read-only. An address that is " +
			"not loopback must be named: 0.0.0.0 for all. Empty: off.",
		field: func(c *Config) any { return &c.HTTP.Listen }},
	{Section: "http", Name: "tls_cert", Kind: Text,
		Help:  "PEM file of a certificate; it is read again when it was renewed. Empty: no TLS.",
		field: func(c *Config) any { return &c.HTTP.TLSCert }},
	{Section: "http", Name: "tls_key", Kind: Text,
		Help:  "PEM file of the certificate's key.",
		field: func(c *Config) any { return &c.HTTP.TLSKey }},
	{Section: "http", Name: "token_file", Kind: Text,
		Help: "File with a token that clients must send as Authorization: Bearer, except to the probes. Empty: none " +
			"is needed.",
		field: func(c *Config) any { return &c.HTTP.TokenFile }},
	{Section: "http", Name: "profiles", Kind: Flag, Default: "false",
		Help:  "Serve profiles of the process at /debug/pprof/. Beyond loopback this needs a token_file.",
		field: func(c *Config) any { return &c.HTTP.Profiles }},
	{Section: "http", Name: "ready_roots", Kind: Choice, Choices: []string{RootsAll, RootsAny, RootsNone}, Default: RootsAll,
		Help:  "Which roots must be in service for /readyz to answer 200.",
		field: func(c *Config) any { return &c.HTTP.ReadyRoots }},
	{Section: "http", Name: "ready_policies", Kind: Flag, Default: "true",
		Help:  "/readyz answers 503 while a policy is in quarantine.",
		field: func(c *Config) any { return &c.HTTP.ReadyPolicies }},
	{Section: "http", Name: "ready_scan", Kind: Flag, Default: "true",
		Help:  "/readyz answers 503 until the roots are scanned.",
		field: func(c *Config) any { return &c.HTTP.ReadyScan }},

	{Section: "otlp", Name: "endpoint", Kind: Text, Unit: "URL",
		Help: "OpenTelemetry collector that gets spans of requests as protobuf over HTTP, such as http://127.0.0.1:4318. The " +
			"path is /v1/traces if there is none. Empty: off.",
		field: func(c *Config) any { return &c.OTLP.Endpoint }},
	{Section: "otlp", Name: "headers_file", Kind: Text,
		Help:  "File with headers for the collector, one \"Name: value\" in a line. Empty: none.",
		field: func(c *Config) any { return &c.OTLP.HeadersFile }},
	{Section: "otlp", Name: "sample_ratio", Kind: Ratio, Default: "1", Unit: "of the requests",
		Help:  "Share of requests that get spans where the client names no trace. Where it does, its decision counts.",
		field: func(c *Config) any { return &c.OTLP.SampleRatio }},
	{Section: "otlp", Name: "timeout", Kind: Duration, Default: "10s", Min: int64(time.Millisecond), Max: int64(10 * time.Minute),
		Help:  "How long the collector may take for one export. No request waits for it.",
		field: func(c *Config) any { return &c.OTLP.Timeout }},

	{Section: "store", Name: "memory", Kind: Size, Auto: true, Default: "auto",
		Help: "Size of a root in memory before all others, whose levels become one higher. It is allocated as chunks need it, and " +
			"what is stored there is copied to the next level at once. auto: a quarter of the memory that is available at start, " +
			"at most half of the roots' capacity; nothing if a root has a level or is in memory, or with durability strict. 0: off.",
		field: func(c *Config) any { return &c.Store.Memory }},
	{Section: "store", Name: "durability", Kind: Choice, Choices: []string{DurabilityNone, DurabilityStrict},
		Default: DurabilityNone,
		Help: "What a publication waits for. none: nothing; a crash can lose chunks, but wrong ones are never " +
			"served. strict: a sync of its bytes and its name.",
		field: func(c *Config) any { return &c.Store.Durability }},
	{Section: "store", Name: "compression", Kind: Choice, Choices: []string{CompressionOff, CompressionAuto, CompressionHuffman},
		Default: CompressionOff,
		Help: "How chunks of 16 KiB and more are stored. huffman: byte planes in " +
			"Huffman codes, without loss; bf16 takes about two thirds of the bytes. A GPU codes its own pages, in device " +
			"memory of eight times slot_bytes (at most 64MiB) for each of its threads, and the processor all others. " +
			"auto: the same where it saves time, or in memory takes none, by the speeds of the root and of the codec as chunks " +
			"are stored and loaded. What is stored stays readable when this changes. " +
			"[[compression]] has another mode for some namespaces.",
		field: func(c *Config) any { return &c.Store.Compression }},
	{Section: "store", Name: "io_timeout", Kind: Duration, Default: "30s",
		Help: "Time limit of one file operation on a root. After it the operation's blocks fail, and the root is " +
			"out of service until it answers again. 0s: no limit.",
		field: func(c *Config) any { return &c.Store.IOTimeout }},
	{Section: "store", Name: "host_id", Kind: Text,
		Help: "Name of this host among those that share a root: 1 to 32 of a-z and 0-9, different on each. Empty: " +
			"derived from the machine's id, which suffices for one host per machine.",
		field: func(c *Config) any { return &c.Store.HostID }},
	{Section: "store", Name: "shared_poll", Kind: Duration, Default: "1s", Min: 1e6,
		Help:  "How often a host of a shared root reads what the others stored and evicted.",
		field: func(c *Config) any { return &c.Store.SharedPoll }},
	{Section: "store", Name: "shared_lapse", Kind: Duration, Default: "10s", Min: 4e6,
		Help: "Silence after which the hosts of a shared root give a host up: at least four polls, and well above " +
			"the time for which the mount caches file attributes.",
		field: func(c *Config) any { return &c.Store.SharedLapse }},
	{Section: "store", Name: "seed", Kind: Count, Default: "1",
		Help:  "Seed of randomised policies. The same seed and requests give the same decisions.",
		field: func(c *Config) any { return &c.Store.Seed }},

	{Section: "move", Name: "workers", Kind: Count, Default: "2", Unit: "threads", Min: 1, Max: 64,
		Help:  "Copies between levels of roots at a time, for each level but the nearest. A copy waits for loads between its parts.",
		field: func(c *Config) any { return &c.Move.Workers }},
	// A disk of 1.7 GB/s keeps what engines store where copies may take that much: BenchmarkNextLife.
	{Section: "move", Name: "bandwidth", Kind: Size, Default: "2GiB", Unit: "bytes per second",
		Help:  "Most bytes per second that are copied between levels, the most valuable first. 0: no limit.",
		field: func(c *Config) any { return &c.Move.Bandwidth }},
	{Section: "move", Name: "waiting", Kind: Duration, Default: "1m", Min: int64(time.Second),
		Help: "How long the copies that wait may take at the speed that the level shows. Beyond that those are shed that are worth " +
			"least: chunks that were not asked for.",
		field: func(c *Config) any { return &c.Move.Waiting }},
	{Section: "move", Name: "shutdown", Kind: Duration, Default: "10s",
		Help: "How long an orderly end may take to copy to the next level what roots in memory hold, the most recently " +
			"used first. 0s: nothing is copied.",
		field: func(c *Config) any { return &c.Move.Shutdown }},

	// On an H200 with 16 cores, 24 workers loaded 4 to 20 % more than 16, with compression 15 to 20 %, and stored as much. 32
	// load no more (host/docs/lab).
	{Section: "engine", Name: "threads_per_gpu", Kind: Count, Default: "24", Unit: "threads", Min: 1, Max: 1024,
		Help: "Workers per GPU, or for all host memory together, that copy and do file I/O. About three for two CPUs, " +
			"since each waits for its GPU or its disk part of the time.",
		field: func(c *Config) any { return &c.Engine.ThreadsPerGPU }},
	{Section: "engine", Name: "slot_bytes", Kind: Size, Default: "4MiB", Min: 1 << 20, Max: 1 << 30,
		Help:  "Size of a staging slot, a multiple of 4KiB: the largest single read or write.",
		field: func(c *Config) any { return &c.Engine.SlotBytes }},
	{Section: "engine", Name: "max_staging_memory", Kind: Size, Default: "512MiB", Min: 1 << 20,
		Help: "Memory for all staging slots. It is in huge pages when enough are reserved (vm.nr_hugepages), and " +
			"near the GPUs on a machine with several NUMA nodes.",
		field: func(c *Config) any { return &c.Engine.MaxStagingMemory }},
	{Section: "engine", Name: "read_preferring_ratio", Kind: Ratio, Default: "0.75", Unit: "of the turns",
		Help: "Share of the workers' turns that loads get while both loads and stores wait. With 0 or 1, one kind " +
			"runs only while none of the other waits.",
		field: func(c *Config) any { return &c.Engine.ReadPreferringRatio }},
	{Section: "engine", Name: "max_write_queue", Kind: Duration, Default: "10s",
		Help:  "How long a store may wait for a worker before it is shed. Loads are never shed. 0s: no limit.",
		field: func(c *Config) any { return &c.Engine.MaxWriteQueue }},
	{Section: "engine", Name: "direct_io", Kind: Flag, Default: "true",
		Help:  "Bypass the page cache (O_DIRECT) where the file system supports it.",
		field: func(c *Config) any { return &c.Engine.DirectIO }},

	{Section: "gds", Name: "cuda", Kind: Choice, Choices: []string{CUDAAuto, CUDAOff}, Default: CUDAAuto,
		Help:  "Use of GPUs. auto: every GPU that the driver shows. off: none; clients register host memory only.",
		field: func(c *Config) any { return &c.GDS.CUDA }},
	{Section: "gds", Name: "copy_blocks", Kind: Count, Default: "32", Unit: "thread blocks", Min: 1, Max: 4096,
		Help: "Most thread blocks of all copy kernels together on a GPU, which the engine's compute lacks at that time. " +
			"A kernel on a window takes half of them, for about ten microseconds.",
		field: func(c *Config) any { return &c.GDS.CopyBlocks }},
	{Section: "gds", Name: "use_cufile", Kind: Flag, Default: "true",
		Help:  "Load libcufile, for the direct route. Where it is missing or fails, everything is staged.",
		field: func(c *Config) any { return &c.GDS.UseCuFile }},
	{Section: "gds", Name: "buffer_mib", Kind: Count, Default: "1024", Unit: "MiB", Max: 1 << 20,
		Help: "Most device memory of each GPU for the direct route, which holds each file in flight there as a " +
			"whole: up to threads_per_gpu files. What does not fit is staged. 0: everything is staged.",
		field: func(c *Config) any { return &c.GDS.BufferMiB }},
	{Section: "gds", Name: "max_concurrent_ops", Kind: Count, Default: "16", Unit: "operations", Min: 1, Max: 1024,
		Help:  "Most cuFile operations in flight on a GPU, each on a thread of its own.",
		field: func(c *Config) any { return &c.GDS.MaxConcurrentOps }},
	{Section: "gds", Name: "handle_cache", Kind: Count, Default: "256", Unit: "files", Max: 1 << 16,
		Help:  "Files that stay registered with cuFile while they are not in use. Each takes a descriptor.",
		field: func(c *Config) any { return &c.GDS.HandleCache }},
	{Section: "gds", Name: "log_dir", Kind: Text,
		Help:  "Directory for cuFile's own log. Empty: the socket's directory.",
		field: func(c *Config) any { return &c.GDS.LogDir }},

	{Section: "session", Name: "lease_ttl", Kind: Duration, Default: "1m0s", Min: 1e6,
		Help:  "How long the hits of a lookup stay pinned when neither a load nor a release follows.",
		field: func(c *Config) any { return &c.Session.LeaseTTL }},
	{Section: "session", Name: "max_wait", Kind: Duration, Default: "1m0s", Min: 1e6,
		Help: "How long a load or store may wait for a semaphore of its client. Then it fails, and what it reserved or " +
			"pinned is free.",
		field: func(c *Config) any { return &c.Session.MaxWait }},
	{Section: "session", Name: "idle_exit", Kind: Duration, Default: "0s", Unit: "a duration, 0 for never",
		Help:  "The host ends when it has had no session for so long. For hosts that engines start for themselves.",
		field: func(c *Config) any { return &c.Session.IdleExit }},
	{Section: "session", Name: "max_sessions", Kind: Count, Default: "1024", Unit: "sessions", Min: 1,
		Help:  "Most clients connected at once.",
		field: func(c *Config) any { return &c.Session.MaxSessions }},
	{Section: "session", Name: "max_keys", Kind: Count, Default: "65536", Unit: "keys", Min: 1, Max: 1 << 24,
		Help:  "Most keys in a lookup.",
		field: func(c *Config) any { return &c.Session.MaxKeys }},
	{Section: "session", Name: "max_chunks", Kind: Count, Default: "4096", Unit: "chunks", Min: 1, Max: 1 << 20,
		Help:  "Most chunks in a load or store.",
		field: func(c *Config) any { return &c.Session.MaxChunks }},
	{Section: "session", Name: "max_message", Kind: Size, Default: "16MiB", Min: 64 << 10, Max: 1 << 30,
		Help:  "Largest message from a client.",
		field: func(c *Config) any { return &c.Session.MaxMessage }},
	{Section: "session", Name: "max_registered", Kind: Size, Default: "0", Unit: "0 for the built-in limit of 8TiB",
		Help:  "Most client memory that all sessions together may register.",
		field: func(c *Config) any { return &c.Session.MaxRegistered }},

	{Section: "peers", Name: "hosts", Kind: Text, Unit: "host:port, ...",
		Help: "Other hosts that lend this one what they hold, separated by commas. A name may have several addresses, and is " +
			"resolved again each minute; this host may be among them.",
		field: func(c *Config) any { return &c.Peers.Hosts }},
	{Section: "peers", Name: "listen", Kind: Text, Unit: "host:port",
		Help:  "Address where this host lends what its own roots hold. Empty: nowhere.",
		field: func(c *Config) any { return &c.Peers.Listen }},
	{Section: "peers", Name: "cert", Kind: Text,
		Help: "PEM file of this host's certificate, for the name by which the others have it, as a server and as a client. It, " +
			"the key and the authorities are read again when they were renewed. Empty: no TLS, and only loopback addresses.",
		field: func(c *Config) any { return &c.Peers.Cert }},
	{Section: "peers", Name: "key", Kind: Text,
		Help:  "PEM file of the certificate's key.",
		field: func(c *Config) any { return &c.Peers.Key }},
	{Section: "peers", Name: "ca", Kind: Text,
		Help:  "PEM file of the authorities that sign the hosts' certificates, and no others.",
		field: func(c *Config) any { return &c.Peers.CA }},
	{Section: "peers", Name: "deadline", Kind: Duration, Default: "50ms", Min: 1e6, Max: 10e9,
		Help:  "How long a lookup may wait for a peer that has promised what is missing here.",
		field: func(c *Config) any { return &c.Peers.Deadline }},
	{Section: "peers", Name: "bandwidth", Kind: Size, Default: "0", Unit: "bytes per second",
		Help:  "Most bytes per second that are lent, and that are borrowed. What is more is refused, or not asked for. 0: no limit.",
		field: func(c *Config) any { return &c.Peers.Bandwidth }},
	{Section: "peers", Name: "demote", Kind: Flag, Default: "true",
		Help: "Offer what the last own level evicts, and no other host is known to have, to one that replaces what it holds at most a third " +
			"as fast, and take what others offer. It needs peers.listen.",
		field: func(c *Config) any { return &c.Peers.Demote }},
	{Section: "peers", Name: "nixl", Kind: Text, Unit: "auto, a file or a directory",
		Help: "Read the bytes of peers that have it too by NIXL: the file libnixl_capi.so, its directory, or that of a Python environment " +
			"with nixl-cu12 or nixl-cu13; auto: what the system's loader or the active environment has. UCX does not encrypt, and who reaches its ports " +
			"may be able to read and write this process's memory: for trusted networks only. Empty: gRPC alone.",
		field: func(c *Config) any { return &c.Peers.NIXL }},
}

var byPath = func() map[string]*Key {
	m := make(map[string]*Key, len(keys))
	for _, k := range keys {
		m[k.Path()] = k
	}
	return m
}()

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
