package config

const compiling = "a policy is compiled within 2GiB of memory, 1m of processor time and 5m"

// gone maps keys that earlier hosts had to a text that says what decides now.
var gone = map[string]string{
	"policy_compile":               compiling,
	"policy_compile.memory":        compiling,
	"policy_compile.cpu":           compiling,
	"policy_compile.time":          compiling,
	"http.ready_policies":          "a host with a policy in quarantine is not ready",
	"http.ready_scan":              "a host that scans a root is not ready",
	"otlp.timeout":                 "the collector has 10s for an export",
	"store.seed":                   "the seed of policies is 1",
	"move.waiting":                 "copies that would take more than 1m are shed, by move.bandwidth and move.workers",
	"engine.read_preferring_ratio": "loads get three of four turns",
	"engine.max_write_queue":       "a store is shed after 10s without a worker",
	"gds.copy_blocks":              "copy kernels have 32 thread blocks",
	"gds.use_cufile":               "gds.max_device_memory = 0 stages everything, and route = \"staged\" a root",
	"gds.buffer_mib":               "it is gds.max_device_memory, a size",
	"gds.max_concurrent_ops":       "16 cuFile operations are in flight on a GPU",
	"gds.handle_cache":             "256 idle files stay registered with cuFile",
	"gds.log_dir":                  "cuFile's log is in the socket's directory",
	"session.max_keys":             "a lookup has at most 65536 keys",
	"session.max_chunks":           "a load or store has at most 4096 chunks",
	"session.max_message":          "a message has at most 16MiB, and less where max_memory is small",
	"peers.demote":                 "a host that lends (peers.listen) takes and makes offers",
	"root.prices":                  "kvhost_bucket_requests_total and kvhost_bucket_bytes_total, times the server's prices",
}

// Gone returns the text about a key that earlier hosts had, given the key's path, variable or flag. It is empty for all other
// names.
func Gone(name string) string {
	for path, instead := range gone {
		if name == path || name == EnvName(path) || name == "--"+FlagName(path) {
			return "; it is gone: " + instead
		}
	}
	return ""
}
