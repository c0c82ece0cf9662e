package config

// othersNames maps variables of LMCache, llm-d's storage connector and UCM, which kvhost does not read, to the setting that kvhost has
// instead. Settings of a connector belong in the engine's kv_connector_extra_config. host/docs/names.md has the whole list.
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
