package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy/meter"
)

// compileJob is one module to compile.
type compileJob struct {
	Wasm   []byte
	Pages  uint32 // most pages of memory, of 64 KiB
	Limits CompileLimits
	Calls  bool // as in [request]
}

// runCompiler compiles a module in a child process and returns its metered form. dir must be an empty directory of this
// user alone; it gets a cache of wazero with the machine code. A [*Refusal] is final; see [isFinal].
func runCompiler(ctx context.Context, job *compileJob, dir string) (metered []byte, err error) {
	limits := job.Limits.withDefaults()
	answer, err := runChild(ctx, &request{
		Dir: dir, Bytes: len(job.Wasm), Pages: job.Pages, Limits: limits,
		Load: maxLoad, Calls: job.Calls,
	}, job.Wasm)
	switch {
	case err != nil:
		return nil, err
	case answer.Error != "":
		return nil, fmt.Errorf("%w: %s", ErrCompiler, answer.Error)
	case answer.Refused != "":
		return nil, newRefusal(answer.Refused)
	case answer.Costly != "":
		return nil, fmt.Errorf("%w: %s", ErrLimit, answer.Costly)
	}
	metered, err = os.ReadFile(filepath.Join(dir, meteredFile))
	if err != nil {
		return nil, fmt.Errorf("%w: its result cannot be read: %w", ErrCompiler, err)
	}
	return metered, nil
}

func runChild(ctx context.Context, r *request, wasm []byte) (*reply, error) {
	head, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	late := fmt.Errorf("%w: over %v", ErrLimit, r.Limits.Time)
	ctx, cancel := context.WithTimeoutCause(ctx, r.Limits.Time, late)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{processName}
	cmd.Dir = "/"
	cmd.Env = []string{
		"GOTRACEBACK=none", fmt.Sprintf("GOMAXPROCS=%d", min(runtime.GOMAXPROCS(0), maxWorkers)),
		"GORACE=atexit_sleep_ms=0", // a program under the race detector sleeps for a second when it ends
	}
	cmd.WaitDelay = time.Second
	// A signal to the host's group, as from a terminal, ends the host in order. The host then ends the child.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, words := &head64{}, &head64{}
	cmd.Stdout, cmd.Stderr = out, words
	stdin, err := cmd.StdinPipe() // open until the child has ended, since its end tells the child that the host has ended
	if err == nil {
		err = cmd.Start()
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	} else if err != nil {
		err = fmt.Errorf("%w: cannot start it: %w", ErrCompiler, err)
	}
	if err != nil {
		if cmd.Process != nil {
			_ = cmd.Wait() // CommandContext kills the child
		}
		return nil, err
	}
	go func() { // a failure means that the child ended early, which is reported below
		_, _ = io.Copy(stdin, io.MultiReader(bytes.NewReader(append(head, '\n')), bytes.NewReader(wasm)))
	}()
	err = cmd.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, ended(err, cmd.ProcessState, words.String(), &r.Limits)
	}
	var answer reply
	if err := json.Unmarshal(out.b, &answer); err != nil {
		return nil, fmt.Errorf("%w: its answer cannot be read: %w", ErrCompiler, err)
	}
	return &answer, nil
}

// ended returns the reason for which a child process ended without an answer.
func ended(err error, state *os.ProcessState, words string, l *CompileLimits) error {
	status, _ := state.Sys().(syscall.WaitStatus)
	used := state.UserTime() + state.SystemTime()
	first, _, _ := strings.Cut(strings.TrimSpace(words), "\n")
	switch {
	case state.ExitCode() == exitCPU, status.Signaled() && used >= l.CPU:
		return fmt.Errorf("%w: over %v of processor time", ErrLimit, l.CPU)
	case outOfMemory(words):
		return fmt.Errorf("%w: over %d MiB of memory", ErrLimit, l.Memory>>20)
	case strings.Contains(words, "stack overflow"):
		return fmt.Errorf("%w: its blocks nest too deeply", ErrLimit)
	case status.Signaled() && status.Signal() == syscall.SIGKILL:
		return fmt.Errorf("%w: killed, perhaps because the machine or the control group is out of memory", ErrCompiler)
	}
	return fmt.Errorf("%w: %w: %q", ErrCompiler, err, first)
}

// outOfMemory recognizes the messages of Go's runtime and of the race detector about a lack of memory.
func outOfMemory(words string) bool {
	return slices.ContainsFunc([]string{
		"out of memory", "cannot allocate", "failed to allocate", "failed to reserve", "cannot map pages",
	}, func(s string) bool { return strings.Contains(words, s) })
}

// head64 keeps the first 64 KiB that are written to it.
type head64 struct{ b []byte }

func (h *head64) Write(p []byte) (int, error) {
	h.b = append(h.b, p[:min(len(p), 64<<10-len(h.b))]...)
	return len(p), nil
}

func (h *head64) String() string { return string(h.b) }

// Refusal is the error of a module that is not valid.
type Refusal struct {
	text string
	kind error
}

// newRefusal returns the refusal with a text of the child. errors.Is matches it with the error of package meter that
// the text contains.
func newRefusal(text string) *Refusal {
	for _, kind := range []error{meter.ErrMalformed, meter.ErrOpcode, meter.ErrReserved, meter.ErrStart, meter.ErrLimit} {
		if strings.Contains(text, kind.Error()) {
			return &Refusal{text, kind}
		}
	}
	return &Refusal{text, nil}
}

func (r *Refusal) Error() string { return r.text }

// Unwrap makes errors.Is find the kind.
func (r *Refusal) Unwrap() error { return r.kind }

// isFinal reports whether compiling the module again would end in the same way.
func isFinal(err error) bool {
	_, ok := errors.AsType[*Refusal](err)
	return ok
}
