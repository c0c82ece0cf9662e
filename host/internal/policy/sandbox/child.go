package sandbox

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

// processName is the first argument of a child process. No user starts a program by this name.
const processName = "kvhost: compile policy"

// request is the parent's message to the child. The module follows it.
type request struct {
	Dir    string // directory of the results
	Bytes  int    // length of the module
	Pages  uint32
	Limits CompileLimits
	Load   loadLimits
	Calls  bool // functions with a name call the host, for a [Profile]
}

// reply is the child's answer.
type reply struct {
	Refused string // the reason for which the module is not valid, or may not be loaded
	Costly  string // the resource of which a load takes too much
	Error   string // the reason for which the compiler failed
}

// exitCPU is the exit code of a child that has used up its processor time.
const exitCPU = 3

// meteredFile is the module with fuel counting injected, in the directory of the results.
const meteredFile = "metered.wasm"

func init() {
	if len(os.Args) == 1 && os.Args[0] == processName {
		os.Exit(child())
	}
}

// child is the whole program of a child process.
func child() int {
	in := bufio.NewReader(os.Stdin)
	var r request
	line, err := in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &r)
	}
	if err == nil {
		err = confine(r.Limits)
	}
	var answer reply
	if err == nil {
		wasm := make([]byte, r.Bytes)
		if _, err = io.ReadFull(in, wasm); err == nil {
			go endWithParent(in)
			answer, err = compile(context.Background(), &r, wasm)
		}
	}
	if err != nil {
		answer = reply{Error: err.Error()}
	}
	if json.NewEncoder(os.Stdout).Encode(&answer) != nil {
		return 1
	}
	return 0
}

// endWithParent ends the process when the parent's end of the pipe closes.
func endWithParent(in io.Reader) {
	_, _ = io.Copy(io.Discard, in)
	os.Exit(1)
}

// confine limits this process.
func confine(l CompileLimits) error {
	data, err := dataBytes()
	if err != nil {
		return err
	}
	for _, r := range []struct {
		resource   int
		soft, hard uint64
	}{
		{unix.RLIMIT_DATA, data + uint64(l.Memory) + overhead, data + uint64(l.Memory) + overhead},
		{unix.RLIMIT_CPU, l.cpuSeconds(), l.cpuSeconds() + 5},
		{unix.RLIMIT_FSIZE, maxCodeBytes, maxCodeBytes},
		{unix.RLIMIT_CORE, 0, 0},
	} {
		if err := unix.Setrlimit(r.resource, &unix.Rlimit{Cur: r.soft, Max: r.hard}); err != nil {
			return fmt.Errorf("cannot limit resource %d to %d: %w", r.resource, r.soft, err)
		}
	}
	over := make(chan os.Signal, 1)
	signal.Notify(over, unix.SIGXCPU)
	go func() { <-over; os.Exit(exitCPU) }()
	// The kernel must kill this process before the host when a container runs out of memory.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
	_ = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	debug.SetMemoryLimit(l.Memory * 7 / 8)
	debug.SetGCPercent(400) // faster; the limit above keeps it within bounds
	return nil
}

// dataBytes is the private writable memory of this process, which RLIMIT_DATA counts.
func dataBytes() (uint64, error) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmData:"); ok {
			kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("/proc/self/status has no VmData")
}

// compile writes the metered module and its machine code. The original is validated too: a module that refers to
// additions of the meter would become valid by the injection, and could refill its own fuel. The interpreter validates
// at a tenth of the compiler's cost; its compiled form is thrown away.
func compile(ctx context.Context, r *request, wasm []byte) (reply, error) {
	metered, err := meter.Inject(wasm)
	if err == nil {
		config := wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(r.Pages).WithDebugInfoEnabled(false)
		err = throughRuntime(ctx, config, wasm)
	}
	if err != nil {
		return refused(err)
	}
	if err := os.WriteFile(filepath.Join(r.Dir, meteredFile), metered, 0o600); err != nil {
		return reply{}, err
	}
	var named experimental.FunctionListener
	if r.Calls {
		named = noListener{}
	}
	ctx = withListeners(ctx, noListener{}, named)
	workers := experimental.WithCompilationWorkers(ctx, min(runtime.GOMAXPROCS(0), maxWorkers))
	if err := throughCache(workers, r, metered); err != nil {
		return refused(err)
	}
	return rehearse(ctx, r, metered)
}

// refused returns the reply for an error that is the module's fault, and any other error as it is.
func refused(err error) (reply, error) {
	var system syscall.Errno
	switch {
	case errors.Is(err, unix.EFBIG):
		return reply{Costly: fmt.Sprintf("over %d MiB of machine code", maxCodeBytes>>20)}, nil
	case errors.As(err, &system):
		return reply{}, err
	}
	return reply{Refused: err.Error()}, nil
}

func throughRuntime(ctx context.Context, config wazero.RuntimeConfig, wasm []byte) error {
	r := wazero.NewRuntimeWithConfig(ctx, config)
	_, err := r.CompileModule(ctx, wasm)
	return errors.Join(err, r.Close(context.WithoutCancel(ctx)))
}

func throughCache(ctx context.Context, r *request, wasm []byte) error {
	cache, err := wazero.NewCompilationCacheWithDir(r.Dir)
	if err != nil {
		return err
	}
	err = throughRuntime(ctx, runtimeConfig(r.Pages).WithCompilationCache(cache), wasm)
	return errors.Join(err, cache.Close(context.WithoutCancel(ctx)))
}

// rehearse loads the machine code as the parent will, and measures the cost, since wazero decodes and validates the
// module again.
func rehearse(ctx context.Context, r *request, wasm []byte) (reply, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := processorTime()
	err := throughCache(withoutCompiling(ctx), r, wasm)
	took := processorTime() - start
	runtime.ReadMemStats(&after)
	switch bytes := after.TotalAlloc - before.TotalAlloc; {
	case err != nil:
		return reply{}, err
	case bytes > r.Load.Bytes:
		return reply{Costly: fmt.Sprintf("%d MiB of memory to load, at most %d MiB", bytes>>20, r.Load.Bytes>>20)}, nil
	case took > r.Load.Time:
		return reply{Costly: fmt.Sprintf("%v of processor time to load, at most %v", took, r.Load.Time)}, nil
	}
	return reply{}, nil
}

// processorTime returns the processor time of all threads of this process.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // every Linux has it
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
