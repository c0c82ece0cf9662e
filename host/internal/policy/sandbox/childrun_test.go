package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/tetratelabs/wazero"
)

func job(wasm []byte, l CompileLimits) *compileJob {
	return &compileJob{Wasm: wasm, Pages: 1, Limits: l}
}

// What is legal and takes a compiler too long is refused by name, with what to do, before it is compiled.
func TestBombs(t *testing.T) {
	testenv.Slow(t)
	const blocks, values, locals = "pairs of blocks", "values of all functions", "locals of all functions"
	for _, c := range []struct {
		name, says string
		wasm       []byte
	}{
		{"functions with locals", locals, manyLocals(49_000, 1000)},
		{"block parameters", blocks, blockParams(170_000, 30)},
		{"large block parameters", values, blockParams(5_000, 999)},
		{"blocks", blocks, nested(500_000/2, opBlock, empty)},
		{"ifs", blocks, nested(100_000, 0x20, 0, opIf, empty)},
		{"loops", blocks, nested(100_000, opLoop, empty)},
		{"phis", blocks, phis(1, 20_000, 5000)},
		{"labels", values, labels(100_000, 1000)},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := runCompiler(t.Context(), job(c.wasm, CompileLimits{CPU: time.Hour}), t.TempDir()) // no time refuses it
			if !errors.Is(err, meter.ErrLimit) || !isFinal(err) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("compiling the bomb of %d bytes: got %v, want a refusal for its %s", len(c.wasm), err, c.says)
			}
		})
	}
}

// Each limit is reported by its name and value.
func TestLimits(t *testing.T) {
	testenv.Slow(t)
	slow, large := phis(1, 5_000, 5000), blockParams(2_990, 999)
	for _, c := range []struct {
		wasm   []byte
		limits CompileLimits
		says   string
	}{
		{slow, CompileLimits{CPU: 1500 * time.Millisecond}, "over 1.5s of processor time"},
		{slow, CompileLimits{Time: 200 * time.Millisecond}, "over 200ms"},
		// Half of the overhead: the meter lets in what needs hardly more than the whole, by the collector's pace.
		{large, CompileLimits{Memory: -overhead / 2, CPU: time.Hour}, "MiB of memory"},
	} {
		_, err := runCompiler(t.Context(), job(c.wasm, c.limits), t.TempDir())
		if !errors.Is(err, ErrLimit) || isFinal(err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("compiling: got %v, want %q", err, c.says)
		}
	}
}

// What a module costs when it is loaded is limited too: the host cannot be protected from that.
func TestLoadingIsRehearsed(t *testing.T) {
	for says, l := range map[string]loadLimits{
		"0 MiB of memory to load":   {Bytes: 1, Time: time.Hour},
		"of processor time to load": {Bytes: 1 << 40, Time: 1},
	} {
		wasm := manyLocals(100, 10)
		answer, err := runChild(t.Context(), &request{
			Dir: t.TempDir(), Bytes: len(wasm), Pages: 1, Limits: CompileLimits{}.withDefaults(), Load: l,
		}, wasm)
		if err != nil || !strings.Contains(answer.Costly, says) {
			t.Errorf("rehearsing: got %+v, %v, want %q", answer, err, says)
		}
	}
}

// The result is what the parent needs, so that it compiles nothing; without it loading fails.
func TestResultIsComplete(t *testing.T) {
	dir := t.TempDir()
	wasm := manyLocals(3, 2)
	metered, err := runCompiler(t.Context(), job(wasm, CompileLimits{}), dir)
	testenv.OK(t, err)
	want, err := meter.Inject(wasm)
	if err != nil || !bytes.Equal(metered, want) {
		t.Errorf("the metered module differs: %v", err)
	}
	load := func(dir string) error {
		cache, err := wazero.NewCompilationCacheWithDir(dir)
		if err != nil {
			return err
		}
		defer cache.Close(context.Background())
		ctx := withoutCompiling(withListeners(t.Context(), noListener{}, nil))
		return throughRuntime(ctx, runtimeConfig(1).WithCompilationCache(cache), metered)
	}
	if err := load(dir); err != nil {
		t.Errorf("with the result: %v", err)
	}
	if err := load(t.TempDir()); !errors.Is(err, errNotCached) {
		t.Errorf("without it: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		wasm []byte
		is   error
		says string
	}{
		{[]byte("(module)"), meter.ErrMalformed, "not a WebAssembly module"},
		{module([]wasmtest.Function{heavy(0, []byte{0xfe, 0, 0})}), meter.ErrOpcode, "0xfe"},
		{module([]wasmtest.Function{heavy(0, []byte{0x6a})}), nil, "i32.add"},
	} {
		_, err := runCompiler(t.Context(), job(c.wasm, CompileLimits{}), t.TempDir())
		if !isFinal(err) || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("compiling: got %v, want a refusal with %q", err, c.says)
		}
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	dir := t.TempDir()
	go func() {
		compiling := func() bool {
			_, err := os.Stat(filepath.Join(dir, meteredFile))
			return err == nil
		}
		for !compiling() {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	_, err := runCompiler(ctx, job(phis(1, 5_000, 5000), CompileLimits{CPU: time.Hour, Time: time.Hour}), dir)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled compilation ended with %v", err)
	}
}

// A child outlives its parent no longer than it takes to notice.
func TestChildEndsWithItsParent(t *testing.T) {
	wasm := phis(1, 5_000, 5000)
	limits := CompileLimits{CPU: time.Hour, Memory: DefaultMemory}
	head, err := json.Marshal(&request{Dir: t.TempDir(), Bytes: len(wasm), Pages: 1, Limits: limits})
	testenv.OK(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{processName}
	// It is closed after the module, as when the parent ends.
	cmd.Stdin = io.MultiReader(bytes.NewReader(append(head, '\n')), bytes.NewReader(wasm))
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("the child whose parent ended: got %v, want exit code 1", err)
	}
}
