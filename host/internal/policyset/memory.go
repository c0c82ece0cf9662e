package policyset

import "github.com/kvhost/kvhost/staging"

// memoryFor is the memory of all policies' instances: what is configured, or a quarter of what the host may use.
func memoryFor(configured int64) uint64 {
	if configured > 0 {
		return uint64(configured)
	}
	total, _, _ := staging.MachineMemory()
	return uint64(total) / 4
}
