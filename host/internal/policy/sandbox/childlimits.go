package sandbox

import (
	"cmp"
	"time"
)

// CompileLimits bound the compilation of one module. Zero fields have a default.
type CompileLimits struct {
	Memory int64         // bytes
	CPU    time.Duration // processor time of all threads, in whole seconds
	Time   time.Duration // elapsed
}

// The defaults are several times what the largest first-party policy needs, see host/docs/lab.
const (
	DefaultMemory = 2 << 30
	DefaultCPU    = 60 * time.Second
	DefaultTime   = 5 * time.Minute
)

// loadLimits is what a module may cost the host when its compiled form is loaded.
type loadLimits struct {
	Bytes uint64
	Time  time.Duration // of processor time
}

var maxLoad = loadLimits{512 << 20, 3 * time.Second}

const (
	// maxCodeBytes bounds each file that a compilation writes.
	maxCodeBytes = 512 << 20
	// overhead is what a process needs besides the compiler's heap, such as stacks of threads.
	overhead = 256 << 20
	// maxWorkers bounds the threads that compile, because each needs memory.
	maxWorkers = 8
)

func (l CompileLimits) withDefaults() CompileLimits {
	return CompileLimits{
		Memory: cmp.Or(l.Memory, DefaultMemory), CPU: cmp.Or(l.CPU, DefaultCPU), Time: cmp.Or(l.Time, DefaultTime),
	}
}

// cpuSeconds is the limit as the kernel takes it.
func (l CompileLimits) cpuSeconds() uint64 { return uint64(max(1, (l.CPU+time.Second-1)/time.Second)) }
