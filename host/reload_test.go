package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// acting is what decides and what looks on, by label: its module and whether it is a shadow.
func acting(h *host.Host) string {
	var list []string
	for _, p := range h.Status().Policies {
		list = append(list, fmt.Sprintf("%s %s %s", p.Name, p.Module, p.State))
	}
	slices.Sort(list)
	return strings.Join(slices.Compact(list), ", ")
}

func reload(t *testing.T, h *host.Host, c *config.Config) error {
	_, err := h.Reload(t.Context(), c)
	return err
}

// A reload changes all that it can of what a configuration says, or nothing.
func TestReload(t *testing.T) {
	testenv.Slow(t)
	dir := policytest.Dir(t, "lru", "fifo", "sieve", "fanout")
	with := func(c *config.Config, policies ...config.Policy) *config.Config {
		next := *c
		next.PolicyDir, next.Policies = dir, policies
		return &next
	}
	main := func(module string) config.Policy { return config.Policy{Name: "main", Module: module} }
	names := func(widths string) config.Policy {
		return config.Policy{Name: "names", Module: "fanout", Config: map[string]string{"widths": widths}}
	}
	trial := config.Policy{Name: "trial", Module: "sieve", Shadow: true}
	base := configuration(t)
	h, _ := hosttest.Start(t, with(base, main("lru"), names("2/1"), trial))
	before := acting(h)
	if !strings.Contains(before, "main lru") || !strings.Contains(before, "trial sieve") {
		t.Fatal(before)
	}
	unknown := trial
	unknown.Name, unknown.Config = "other", map[string]string{"nonsense": "1"}
	roles := main("fifo")
	roles.Roles = []string{"admit"}
	evicts := func(c *config.Config, name string) *config.Config {
		c.Roots = slices.Clone(c.Roots)
		c.Roots[0].Evict = name
		return c
	}
	for _, c := range []struct {
		what string
		cfg  *config.Config
		is   error
		says string
	}{
		{"a module that is not there", with(base, main("fifo"), names("2/1"), trial, config.Policy{Name: "more", Module: "nobody", Shadow: true}), policyset.ErrPolicy, "nobody"},
		{"a root that names a module without the role", evicts(with(base, main("lru"), config.Policy{Name: "names", Module: "fanout"}, trial), "names"), policyset.ErrPolicy, "names to evict"},
		{"one that does not start after others", with(base, main("fifo"), names("1/1/1"), trial, unknown), nil, "shadow other"},
		{"a role twice", with(base, main("fifo"), names("2/1"), trial, config.Policy{Name: "more", Module: "lru"}), policyset.ErrRole, "evict"},
		{"a role that the module lacks", with(base, roles, names("2/1"), trial), policyset.ErrPolicy, "admit"},
	} {
		err := reload(t, h, c.cfg)
		if err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("reload to %s: got %v, want %q", c.what, err, c.says)
		}
		if now := acting(h); now != before {
			t.Errorf("%s: %s in place of %s", c.what, now, before)
		}
	}
	testenv.OK(t, reload(t, h, with(base, main("fifo"), names("1/1/1"))))
	if now := acting(h); !strings.Contains(now, "main fifo") || strings.Contains(now, "trial") {
		t.Error(now)
	}
	if err := reload(t, h, with(base, main("fifo"), names("1/1/1"), trial)); err != nil { // the shadow is back
		t.Fatal(err)
	}
	if now := acting(h); !strings.Contains(now, "trial sieve") {
		t.Error(now)
	}
	// A policy that is new, for a root and for namespaces; one that is gone; and a shadow that acts.
	acts := config.Policy{Name: "trial", Module: "sieve"}
	vendor := names("1/1/1")
	vendor.Namespaces = []string{"m*"}
	testenv.OK(t, reload(t, h, evicts(with(base, acts, vendor), "trial")))
	if now := acting(h); !strings.Contains(now, "trial sieve") || strings.Contains(now, "main") || !strings.Contains(now, "names fanout") {
		t.Error(now)
	}
	testenv.OK(t, reload(t, h, with(base)))
	if now := acting(h); strings.Contains(now, "trial") || strings.Contains(now, "names") {
		t.Error(now)
	}
}

// stopCompiler waits for a child process of this one that compiles, and stops it.
func stopCompiler(t *testing.T) {
	t.Helper()
	testenv.Until(t, "a process that compiles", func() bool {
		list, err := filepath.Glob("/proc/[0-9]*/cmdline")
		testenv.OK(t, err)
		for _, name := range list {
			args, err := os.ReadFile(name)
			if err != nil || !strings.Contains(string(args), "compile policy") {
				continue
			}
			var pid, parent int
			var command, state string
			stat, _ := os.ReadFile(filepath.Join(filepath.Dir(name), "stat"))
			text := strings.NewReplacer("(", "", ")", "").Replace(string(stat))
			if _, err := fmt.Sscan(text, &pid, &command, &state, &parent); err == nil && parent == os.Getpid() {
				if err := unix.Kill(pid, unix.SIGSTOP); err == nil {
					return true
				}
			}
		}
		return false
	})
}

// A change that hangs, here in the compiler, must not hold up other changes or outlive its context.
func TestHungSwapBlocksNoOther(t *testing.T) {
	c := configuration(t)
	c.PolicyDir = policytest.Dir(t, "lru", "fifo")
	module, err := os.ReadFile(filepath.Join(c.PolicyDir, "lru.wasm"))
	testenv.OK(t, err)
	hangs := filepath.Join(t.TempDir(), "hangs.wasm") // with a section of its own: no cache has it
	testenv.OK(t, os.WriteFile(hangs, append(module, wasmtest.Custom(hangs)...), 0o600))
	c.Policies = []config.Policy{{Name: "trial", Module: "fifo", Shadow: true}}
	h, _ := hosttest.Start(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hung := make(chan error, 1)
	go func() {
		_, err := h.Policies().Swap(ctx, "trial", config.Policy{Module: hangs})
		hung <- err
	}()
	stopCompiler(t)
	empty := *c
	empty.Policies = nil
	reloaded := make(chan error, 1)
	go func() { reloaded <- reload(t, h, &empty) }()
	if err := testenv.Receive(t, "the end of a reload beside a hung swap", reloaded); err != nil || strings.Contains(acting(h), "trial") {
		t.Errorf("reload beside a hung swap: %v, %s", err, acting(h))
	}
	cancel()
	if err := <-hung; !errors.Is(err, context.Canceled) {
		t.Errorf("the hung swap ended with %v", err)
	}
}
