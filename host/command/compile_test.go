package command

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policyset"
)

// compileBomb is an evict policy that takes minutes to compile: 100,000 nested blocks.
func compileBomb() string {
	leb := func(n int) []byte {
		return []byte{byte(n) | 0x80, byte(n>>7) | 0x80, byte(n>>14) | 0x80, byte(n >> 21)}
	}
	sized := func(b ...[]byte) []byte {
		all := slices.Concat(b...)
		return append(leb(len(all)), all...)
	}
	export := func(name string, kind, index byte) []byte {
		return append(append([]byte{byte(len(name))}, name...), kind, index)
	}
	const depth, i32, i64 = 5_000, 0x7f, 0x7e
	bomb := sized([]byte{0}, bytes.Repeat([]byte{0x03, 0x40}, depth), bytes.Repeat([]byte{0x0b}, depth),
		[]byte{0x42, 0, 0x0b})
	return string(slices.Concat([]byte("\x00asm\x01\x00\x00\x00"),
		[]byte{1}, sized([]byte{4, 0x60, 0, 0, 0x60, 2, i32, i32, 1, i32, 0x60, 1, i32, 1, i32, 0x60, 2, i32, i32, 1, i64}),
		[]byte{3}, sized([]byte{4, 0, 1, 2, 3}), []byte{5, 3, 1, 0, 1},
		[]byte{7}, sized([]byte{6}, export("memory", 2, 0), export("kvhost_abi_1", 0, 0), export("kv_buffer", 0, 1),
			export("kv_init", 0, 2), export("kv_events", 0, 1), export("kv_step", 0, 3)),
		[]byte{10}, sized([]byte{4, 2, 0, 0x0b, 4, 0, 0x41, 0, 0x0b, 4, 0, 0x41, 0, 0x0b}, bomb)))
}

const compiling = `"msg":"compiling policy","policy":"bomb"`

// A host that compiles a bomb at its start ends at a signal, without blaming the module.
func TestStopWhileCompiling(t *testing.T) {
	dir := shortDir(t)
	write(t, dir, "bomb.wasm", compileBomb())
	logged, ended, stop := launch(t, command(t, dir, "--policy", "bomb.wasm", "--http-listen", ""))
	await(t, logged, compiling, ended)
	if code := stop(syscall.SIGTERM); code != exitOK || !strings.Contains(logged(), "stopped while starting") {
		t.Errorf("exit code %d\n%s", code, logged())
	}
}

// While a swap compiles a bomb, others are made, and a signal ends the host. What the bomb used too much of is named.
func TestSwapWhileCompiling(t *testing.T) {
	dir := shortDir(t)
	write(t, dir, "bomb.wasm", compileBomb())
	write(t, dir, "kvhost.toml", `
[http]
listen = ""
[policy_compile]
cpu = "1h"
time = "1h"
[[policy]]
name = "main"
module = "lru"
`)
	_, logged, stop := startHost(t, dir, "--config", "kvhost.toml")
	bad := command(t, dir, "policy", "swap", "--unchecked", "main", "bomb.wasm")
	testenv.OK(t, bad.Start())
	refused := make(chan error, 1)
	go func() { refused <- bad.Wait() }()
	await(t, logged, compiling, nil)
	if r := finish(t, command(t, dir, "policy", "swap", "main", "lru")); r.code != exitOK {
		t.Errorf("another swap: %d\n%s", r.code, r.stderr)
	}
	select {
	case err := <-refused:
		t.Fatalf("the first swap ended before: %v\n%s", err, logged())
	default:
	}
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d\n%s", code, logged())
	}
	if <-refused == nil {
		t.Error("the bomb was swapped in")
	}
}

// A module that exhausts the compiler is refused in words that name it, the limit and the key.
func TestCompileLimits(t *testing.T) {
	dir := shortDir(t)
	write(t, dir, "bomb.wasm", compileBomb())
	r := finish(t, command(t, dir, "--policy", "bomb.wasm", "--policy-compile-cpu", "1s", "--http-listen", ""))
	const says = "bomb.wasm: compiling took too much: over 1s of processor time (policy_compile.cpu)"
	if r.code != exitPolicy || !strings.Contains(r.stderr, says) {
		t.Errorf("exit code %d, want that a policy was refused\n%s", r.code, r.stderr)
	}
}

// A service manager tries again when the compiler was killed, and not when the module is to blame.
func TestExitCodeOfCompiler(t *testing.T) {
	for err, want := range map[error]int{sandbox.ErrCompiler: exitFailure, sandbox.ErrLimit: exitPolicy} {
		if code := exitCode(fmt.Errorf("%w: x: %w", policyset.ErrPolicy, err)); code != want {
			t.Errorf("%v: exit code %d, want %d", err, code, want)
		}
	}
}
