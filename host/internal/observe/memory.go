package observe

import (
	"maps"
	"slices"

	"github.com/kvhost/kvhost/host/internal/budget"
)

// The budget of the host's memory.
var (
	memoryLimit   = gauged("memory_limit_bytes", "The setting max_memory.", "")
	memoryHeld    = gauged("memory_bytes", "Memory held within max_memory.", "part")
	memoryRefused = counted("memory_refusals_total", "Messages and sessions refused for their share of the memory.", "")
)

func collectMemory(out series, f budget.Figures) {
	out.put(memoryLimit, float64(f.Limit))
	out.put(memoryRefused, float64(f.Refused))
	out.put(memoryHeld, float64(f.Own), "staging")
	for _, part := range slices.Sorted(maps.Keys(f.Parts)) {
		out.put(memoryHeld, float64(f.Parts[part]), part)
	}
}
