package config

// othersNames are variables of LMCache, of llm-d's storage connector and of UCM that kvhost does not read, and what it has for each.
// A connector's settings are those in an engine's kv_connector_extra_config. host/docs/names.md has them all.
var othersNames = map[string]string{
	"LMCACHE_CACHE_POLICY":        "policy",
	"LMCACHE_CHUNK_SIZE":          "chunk_tokens, the connector's",
	"LMCACHE_CONFIG_FILE":         EnvFile,
	"LMCACHE_CUFILE_BUFFER_SIZE":  "gds.max_device_memory",
	"LMCACHE_GDS_PATH":            "root.path",
	"LMCACHE_LOCAL_CPU":           "store.memory",
	"LMCACHE_LOCAL_DISK":          "root.path",
	"LMCACHE_LOG_LEVEL":           "log.level",
	"LMCACHE_MAX_LOCAL_CPU_SIZE":  "store.memory",
	"LMCACHE_MAX_LOCAL_DISK_SIZE": "root.capacity",
	"LMCACHE_REMOTE_URL":          "peers.hosts, or a bucket as root.path",
	"LMCACHE_SAVE_DECODE_CACHE":   "store, the connector's",
	"LMCACHE_USE_LAYERWISE":       "load_in, the connector's",
	"STORAGE_CONNECTOR_DEBUG":     "log.level",
	"STORAGE_LOG_LEVEL":           "log.level",
	"UNIFIED_CACHE_LOG_LEVEL":     "log.level",
	"USE_KERNEL_COPY_READ":        "no name for it: the kind of copy is chosen by itself",
	"USE_KERNEL_COPY_WRITE":       "no name for it: the kind of copy is chosen by itself",
}
