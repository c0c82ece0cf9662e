package sandbox

import (
	"cmp"
	"time"
)

// CompileLimits bound the compilation of one module. Zero fields have a default.
type CompileLimits struct {
	Memory int64         // bytes
	CPU    time.Duration // processor time of all threads, in whole seconds
	Time   time.Duration // elapsed time
}

// The defaults are several times the needs of the largest first-party policy; see host/docs/lab.
const (
	DefaultMemory = 2 << 30
	DefaultCPU    = 60 * time.Second
	DefaultTime   = 5 * time.Minute
)

// loadLimits bounds the cost of loading a module's compiled form in the host.
type loadLimits struct {
	Bytes uint64
	Time  time.Duration // processor time
}

var maxLoad = loadLimits{512 << 20, 3 * time.Second}

const (
	// maxCodeBytes bounds each file that a compilation writes.
	maxCodeBytes = 512 << 20
	// overhead is the memory of a process without the compiler's heap, for example stacks of threads.
	overhead = 256 << 20
	// maxWorkers bounds the threads that compile, because each needs memory.
	maxWorkers = 8
)

func (l CompileLimits) withDefaults() CompileLimits {
	return CompileLimits{
		Memory: cmp.Or(l.Memory, DefaultMemory), CPU: cmp.Or(l.CPU, DefaultCPU), Time: cmp.Or(l.Time, DefaultTime),
	}
}

// cpuSeconds returns the limit in the kernel's unit.
func (l CompileLimits) cpuSeconds() uint64 { return uint64(max(1, (l.CPU+time.Second-1)/time.Second)) }
