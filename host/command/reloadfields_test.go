package command

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// changed is the base file with one key changed, and how its effect is seen.
type changed struct {
	file    string
	reload  bool
	check   func(h *served, key string)
	refusal string // names the key otherwise than by its path
}

// scalars are the single keys that a reload changes. stored names a module of the policy store.
func scalars(h *served) map[string]changed {
	limit := func(key, value string, says string) changed {
		return changed{h.base() + "[policy_compile]\n" + key + " = " + value + "\n" + baseRoots + "[[policy]]\nmodule = \"modules/" + key + ".wasm\"\n",
			true, compiles(says), ""}
	}
	acts := func(name string) func(*served, string) {
		return func(h *served, key string) {
			if p := h.acting(name); p == nil {
				h.Errorf("%s: policy %s does not act: %v", key, name, h.status().Policies)
			}
		}
	}
	return map[string]changed{
		"policy_dir": {"policy_dir = \"modules\"\n" + h.base() + baseRoots + "[[policy]]\nmodule = \"special\"\n", true, acts("special"), ""},
		"policy_memory": {"policy_memory = \"512MiB\"\n" + h.base() + baseRoots, true, func(h *served, key string) {
			if got := h.status().PolicyMemoryLimit; got != 512<<20 {
				h.Errorf("%s: got %d bytes, want 512 MiB", key, got)
			}
		}, ""},
		"policy_compile.memory": limit("memory", `"1GiB"`, `"memory":1073741824`),
		"policy_compile.cpu":    limit("cpu", `"59s"`, `"cpu":"59s"`),
		"policy_compile.time":   limit("time", `"4m"`, `"limit":"4m0s"`),
		"log.level": {strings.Replace(h.base(), "[log]\n", "[log]\nlevel = \"debug\"\n", 1) + baseRoots, true, func(h *served, key string) {
			before := len(h.logged())
			s, err := h.hello(0)
			testenv.OK(h, err)
			defer s.Close()
			if _, err := s.Lookup(h.Context(), client.LookupRequest{Group: 9}); err == nil {
				h.Error("a lookup in a group that is not there was answered")
			}
			h.until("a line of level debug", func() bool { return strings.Contains(h.logged()[before:], `"level":"DEBUG"`) })
		}, ""},
	}
}

// compileLimits are the keys of policy_compile, each of which has a module of its own.
var compileLimits = []string{"memory", "cpu", "time"}

// mode checks the mode of both sockets.
func mode(want os.FileMode) func(*served, string) {
	return func(h *served, key string) {
		for _, name := range []string{"kvhost.sock", "kvhost.sock.fd"} {
			if info, err := os.Stat(filepath.Join(h.dir, name)); err != nil || info.Mode().Perm() != want {
				h.Errorf("%s: want mode %v of %s, got %v and %v", key, want, name, info.Mode(), err)
			}
		}
	}
}

// compiles checks a limit of the process that compiles, which the log has.
func compiles(text string) func(*served, string) {
	return func(h *served, key string) {
		lines := regexp.MustCompile(`(?m)^.*"compiling policy".*$`).FindAllString(h.logged(), -1)
		if len(lines) == 0 || !strings.Contains(lines[len(lines)-1], text) {
			h.Errorf("%s: no policy was compiled with %s: %q", key, text, lines)
		}
	}
}

// took checks that a policy of this name acts as a role, from a module.
func took(name, role, module string) func(*served, string) {
	return func(h *served, key string) {
		if p := h.acting(name); p == nil || proto.Word(p.Role) != role || p.Module != module || p.State != proto.PolicyState_POLICY_STATE_ACTING {
			h.Errorf("%s: the policies are %v", key, h.status().Policies)
		}
	}
}

// fieldFiles are files for the keys of array tables. A policy that is refused for the value of a key shows that the value
// counts, and that nothing else did.
func fieldFiles(h *served) map[string]changed {
	roots := func(old, new string) string { return h.base() + strings.Replace(baseRoots, old, new, 1) }
	policies := func(lines string) string {
		return h.base() + strings.ReplaceAll(baseRoots, "write =", "evict = \"main\"\nwrite =") +
			"[[policy]]\nname = \"main\"\nmodule = \"modules/lru.wasm\"\n" + lines
	}
	place := func(lines string) string {
		return h.base() + baseRoots + "[[policy]]\nname = \"names\"\nmodule = \"modules/fanout.wasm\"\n" + lines
	}
	return map[string]changed{
		"policy[0].name":   {policies(""), true, took("main", "evict", "lru"), ""},
		"policy[0].module": {h.base() + baseRoots + "[[policy]]\nmodule = \"modules/sieve.wasm\"\n", true, took("sieve", "evict", "sieve"), ""},
		"policy[0].namespaces": {place("namespaces = [\"m*\"]\n"), true, func(h *served, key string) {
			took("names", "place", "fanout")(h, key)
			h.fill(0, 1) // a namespace that it names files of
			if p := h.acting("names"); p.Records == 0 {
				h.Errorf("%s: it names no files: %v", key, p)
			}
		}, ""},
		"policy[0].levels": {place("levels = [1]\n"), true, took("names", "place", "fanout"), ""},
		"policy[0].shadow": {policies("[[policy]]\nname = \"trial\"\nmodule = \"modules/sieve.wasm\"\nshadow = true\n"), true, func(h *served, key string) {
			if p := h.acting("trial"); p == nil || p.State != proto.PolicyState_POLICY_STATE_SHADOW {
				h.Errorf("%s: the shadow is %v", key, p)
			}
		}, ""},
		"policy[0].capacity": {policies("[[policy]]\nname = \"trial\"\nmodule = \"modules/sieve.wasm\"\nshadow = true\ncapacity = \"5MiB\"\n"), true, func(h *served, key string) {
			if p := h.acting("trial"); p == nil || p.GetTrial().GetCapacity() != 5<<20 {
				h.Errorf("%s: the shadow is %v, want a capacity of 5 MiB", key, p)
			}
		}, ""},
		"policy[0].roles":        {policies("roles = [\"place\"]\n"), false, nil, "the role"},
		"policy[0].grants":       {policies("grants = [\"nonsense\"]\n"), false, nil, "grants"},
		"policy[0].sha256":       {policies(fmt.Sprintf("sha256 = %q\n", strings.Repeat("ab", 32))), false, nil, "SHA-256"},
		"policy[0].public_key":   {policies("public_key = \"" + strings.Repeat("A", 56) + "\"\n"), false, nil, "no valid signature"},
		"policy[0].on_fault":     {policies("on_fault = \"never\"\n"), false, nil, "on_fault"},
		"policy[0].memory_pages": {policies("memory_pages = 1\n"), false, nil, "memory_pages"},
		"policy[0].fuel":         {policies("fuel = {call = 1, record = 1}\n"), false, nil, "fuel"},
		"policy[0].config":       {policies("[policy.config]\nnonsense = 1\n"), false, nil, "nonsense"},

		"root[0].capacity": {roots("64MiB", "8MiB"), true, func(h *served, key string) {
			if c := h.status().Roots[1].Capacity; c != 8<<20 {
				h.Errorf("%s is %d", key, c)
			}
			h.until("eviction", func() bool { return h.used(1) <= 8<<20 })
			if ok, line := h.reload(roots("64MiB", "20GiB")); !ok {
				h.Errorf("%s does not grow: %s", key, line)
			}
			if c := h.status().Roots[1].Capacity; c != 20<<30 {
				h.Errorf("%s is %d", key, c)
			}
			if n := h.fill(0, 60); n > 0 || h.used(1) <= 8<<20 {
				h.Errorf("%s: %d of 60 chunks refused, %d bytes used", key, n, h.used(1))
			}
		}, ""},
		"root[0].evict": {policies(""), true, took("main", "evict", "lru"), ""},
		"root[0].min_free": {roots("write =", "min_free = \"1PiB\"\nwrite ="), true, func(h *served, key string) {
			h.until("measurement", func() bool { return h.status().Roots[0].Limit == 0 })
		}, ""},
		"root[0].daily_writes": {h.base() + strings.ReplaceAll(baseRoots, "capacity =", "daily_writes = 1\ncapacity ="), true, func(h *served, key string) {
			if n := h.fill(0, 1); n != 1 {
				h.Errorf("%s: a chunk was stored", key)
			}
		}, ""},

		"tenant[0].id":       {h.base() + baseRoots + "[[tenant]]\nid = 7\nsessions = 1\n", true, tenantSessions, ""},
		"tenant[0].sessions": {h.base() + baseRoots + "[[tenant]]\nid = \"*\"\nsessions = 1\n", true, tenantSessions, ""},
		"tenant[0].uids": {h.base() + baseRoots + "[[tenant]]\nid = 7\nuids = [12345]\n", true, func(h *served, key string) {
			mode(0o666)(h, key)
			if s, err := h.hello(7); err == nil {
				s.Close()
				h.Errorf("%s: another user is the tenant", key)
			}
		}, ""},
		"tenant[0].private": {h.base() + baseRoots + "[[tenant]]\nid = 7\nprivate = true\n", true, func(h *served, key string) {
			before, _ := os.ReadDir(filepath.Join(h.dir, "a", ".kvhost", "namespaces"))
			h.fill(7, 1)
			after, _ := os.ReadDir(filepath.Join(h.dir, "a", ".kvhost", "namespaces"))
			if len(after) != len(before)+1 {
				h.Errorf("%s: its entries are not apart: %d namespaces, %d before", key, len(after), len(before))
			}
		}, ""},
		"tenant[0].quota": {h.base() + baseRoots + "[[tenant]]\nid = 7\nquota = \"1KiB\"\n", true, func(h *served, key string) {
			if n := h.fill(7, 1); n != 1 {
				h.Errorf("%s: a chunk over the quota was stored", key)
			}
			if n := h.fill(8, 1); n != 0 {
				h.Errorf("%s: another tenant's chunk was refused", key)
			}
		}, ""},

		"root[0].level": {roots("level = 1", "level = 2"), false, nil, "root[1].level"},
	}
}

func tenantSessions(h *served, key string) {
	defer h.alone(7).Close()
	if other, err := h.hello(7); err == nil {
		other.Close()
		h.Errorf("%s: a second session of the tenant", key)
	}
}
