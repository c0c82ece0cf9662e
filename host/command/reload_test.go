package command

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
)

// served is a host whose file a test changes.
type served struct {
	*testing.T
	dir, file string
	logged    func() string
	signal    func(os.Signal)
	engines   int
}

// base is the file that every change starts from.
func (h *served) base() string {
	return fmt.Sprintf(`socket = "kvhost.sock"
[http]
listen = %q
[log]
format = "json"
[engine]
max_staging_memory = "16MiB"
[gds]
cuda = "off"
`, anyPort)
}

const baseRoots = "[[root]]\npath = \"a\"\ncapacity = \"32MiB\"\nwrite = \"through\"\n[[root]]\npath = \"b\"\ncapacity = \"64MiB\"\nlevel = 1\n"

// reload writes a file, sends SIGHUP, and returns the line of the log that says what came of it.
func (h *served) reload(text string) (ok bool, line string) {
	h.Helper()
	testenv.OK(h, os.WriteFile(h.file, []byte(text), 0o600))
	before := len(h.logged())
	h.signal(syscall.SIGHUP)
	end := regexp.MustCompile(`(?m)^.*"msg":"configuration (reloaded|not reloaded: nothing changed)".*$`)
	h.until("the reload to end", func() bool { line = end.FindString(h.logged()[before:]); return line != "" })
	return strings.Contains(line, `"configuration reloaded"`), line
}

func (h *served) until(what string, done func() bool) {
	h.Helper()
	until(h.T, what, done)
}

func (h *served) status() *proto.StatusResponse {
	h.Helper()
	st, err := (&running{socket: filepath.Join(h.dir, "kvhost.sock")}).status(h.Context())
	testenv.OK(h, err)
	return st
}

// settled is what a refused reload must leave as it was.
func (h *served) settled() string {
	h.Helper()
	var b strings.Builder
	st := h.status()
	for _, r := range st.Roots {
		fmt.Fprintln(&b, r.Path, r.Capacity)
	}
	for _, p := range st.Policies {
		fmt.Fprintln(&b, p.Name, p.Role, p.Root, p.Digest, p.State)
	}
	return fmt.Sprintln(b.String(), st.PolicyMemoryLimit, st.Budgets[0].Limit)
}

func (h *served) greeting(tenant uint32) client.Hello {
	h.engines++
	hello := hosttest.Hello(filepath.Join(h.dir, "kvhost.sock"), kv.Uniform(2, 2, 1, 64<<10))
	hello.Engine, hello.Tenant = fmt.Sprint("e", h.engines), tenant
	return hello
}

func (h *served) hello(tenant uint32) (*client.Session, error) {
	return client.Dial(h.Context(), h.greeting(tenant))
}

// alone is a session that is let in when no other is left.
func (h *served) alone(tenant uint32) (s *client.Session) {
	h.Helper()
	h.until("end of all sessions", func() bool {
		var err error
		s, err = h.hello(tenant)
		return err == nil
	})
	return s
}

// fill stores so many chunks of 256 KiB for a tenant, and returns the number that was refused.
func (h *served) fill(tenant uint32, chunks int) (refused int) {
	h.Helper()
	s := hosttest.Dial(h, h.greeting(tenant), 4, 0, 0)
	defer s.Arena.Close()
	defer s.Close()
	for range chunks {
		h.engines++
		key := kv.Key{byte(h.engines), byte(h.engines >> 8), byte(tenant)}
		if s.Put(client.StoreChunk{Key: key, Blocks: []uint32{0, 1}}).Bytes == 0 {
			refused++
		}
	}
	return refused
}

func (h *served) used(root int) uint64 { return h.status().Roots[root].Used }

// acting is what the status says of a policy, or nil.
func (h *served) acting(name string) *proto.PolicyStatus {
	h.Helper()
	for _, p := range h.status().Policies {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// Every key that a reload changes shows its effect in a running host. What is refused is refused by its name and changes nothing;
// package config tests which keys those are.
func TestReloadOfEachKey(t *testing.T) {
	t.Parallel() // it waits more than it works
	dir := testenv.Dir(t)
	h := &served{T: t, dir: dir, file: filepath.Join(dir, "k.toml")}
	for from, to := range map[string]string{"fifo": "special", "lru": "lru", "fanout": "fanout", "sieve": "sieve"} {
		module, err := os.ReadFile(filepath.Join(policytest.Dir(t, "fifo", "lru", "fanout", "sieve"), from+".wasm"))
		testenv.OK(t, err)
		testenv.OK(t, os.MkdirAll(filepath.Join(dir, "modules"), 0o700))
		testenv.OK(t, os.WriteFile(filepath.Join(dir, "modules", to+".wasm"), module, 0o600))
	}
	base := h.base() + baseRoots
	testenv.OK(t, os.WriteFile(h.file, []byte(base), 0o600))
	cmd, logged, stop := startHost(t, dir, "--config", h.file)
	h.logged, h.signal = logged, func(s os.Signal) { cmd.Process.Signal(s) }
	if n := h.fill(0, 80); n > 0 {
		t.Fatalf("%d of 80 chunks refused", n)
	}
	try := func(key, text string, reload bool, check func(*served, string), refusal string) {
		before := h.settled()
		ok, line := h.reload(text)
		switch {
		case ok != reload:
			t.Errorf("reload of %s: the log says %s", key, line)
		case !reload && !strings.Contains(line, cmp.Or(refusal, key)):
			t.Errorf("%s: refused by another name: %s", key, line)
		case !reload:
			if after := h.settled(); after != before {
				t.Errorf("%s: something changed: %s\nbefore: %s\nafter: %s", key, line, before, after)
			}
		case reload && !strings.Contains(line, strings.SplitN(key, "[", 2)[0]):
			t.Errorf("%s: the log does not name it: %s", key, line)
		case reload && check != nil:
			check(h, key)
		}
		if ok {
			if ok, line := h.reload(base); !ok {
				t.Fatalf("%s: not changed back: %s", key, line)
			}
		}
	}
	single := scalars(h)
	for _, k := range config.Keys() {
		if _, tried := single[k.Path()]; k.Reload != tried {
			t.Errorf("%s: reloaded: %v, tried: %v", k.Path(), k.Reload, tried)
		}
	}
	for _, list := range []map[string]changed{single, fieldFiles(h)} {
		for key, c := range list {
			try(key, c.file, c.reload, c.check, c.refusal)
		}
	}
	if code := stop(syscall.SIGTERM); code != 0 {
		t.Errorf("the host ended with %d", code)
	}
}

// kvhost reload waits for the result, prints it, and has the exit code of a start that is refused for the same.
func TestReloadCommand(t *testing.T) {
	dir := testenv.Dir(t)
	const base = "socket = 's'\nhttp.listen = '" + anyPort + "'\ngds.cuda = 'off'\npolicy_cache = ''\n[[root]]\npath = 'kv'\n"
	write(t, dir, "k.toml", base+"capacity = '32MiB'\n")
	_, logged, stop := startHost(t, dir, "--config", "k.toml")
	for _, c := range []struct {
		text string
		code int
		says string
	}{
		{base + "capacity = '16MiB'\n[log]\nlevel = 'warn'\n", exitOK, "reloaded: log.level, root[0].capacity\n"},
		{base + "capacity = '16MiB'\n[log]\nlevel = 'warn'\n", exitOK, "nothing had changed"},
		{base + "capacity = '32MiB'\n[session]\nmax_sessions = 5\n", exitUsage, "session.max_sessions needs a restart"},
		{base + "capacity = '32MiB'\nno_such_key = 1\n", exitUsage, "no_such_key"},
		{base + "capacity = '32MiB'\n[[policy]]\nmodule = 'nothing.wasm'\n", exitPolicy, "nothing.wasm"},
	} {
		write(t, dir, "k.toml", c.text)
		r := finish(t, command(t, dir, "reload", "--socket", "s"))
		if out := r.stdout + r.stderr; r.code != c.code || !strings.Contains(out, c.says) || strings.Contains(out, "rpc error") {
			t.Errorf("reload of %q: exit code %d, want %d and %q\n%s", c.text, r.code, c.code, c.says, out)
		}
		want := map[bool]string{true: "kvhost_config_last_reload_successful 1\n", false: "kvhost_config_last_reload_successful 0\n"}[c.code == exitOK]
		if _, got := get(t, "http://"+httpAddress(t, logged)+"/metrics"); !strings.Contains(got, want) {
			t.Errorf("metrics after the reload of %q have no %q", c.text, want)
		}
	}
	if code := stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if r := finish(t, command(t, dir, "reload", "--socket", "s")); r.code != exitFailure || !strings.Contains(r.stderr, "no host is running there") {
		t.Errorf("reload without a host: exit code %d, %s", r.code, r.stderr)
	}
}

// A module whose file has changed is a change, under the same name, too.
func TestReloadOfAModule(t *testing.T) {
	dir := testenv.Dir(t)
	module(t, dir, "mine.wasm", "fifo")
	startHost(t, dir, "--root", "kv=8MiB", "--policy", "mine.wasm", "--socket", "s", "--http-listen", "")
	for _, c := range []struct{ policy, says string }{{"fifo", "reloaded: nothing had changed\n"}, {"lru", "reloaded: the module of policy mine\n"}} {
		module(t, dir, "mine.wasm", c.policy)
		if r := finish(t, command(t, dir, "reload", "--socket", "s")); r.stdout != c.says {
			t.Errorf("reload when the module is %s: got %q and %q, want %q", c.policy, r.stdout, r.stderr, c.says)
		}
	}
}

// A service manager learns that the host is ready once its socket answers.
func TestServiceManagerLearnsThatTheHostIsReady(t *testing.T) {
	dir := testenv.Dir(t)
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	testenv.OK(t, err)
	defer manager.Close()
	cmd := command(t, dir, "--root", "kv=8MiB", "--socket", "s", "--http-listen", "")
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+filepath.Join(dir, "notify"))
	logged, ended, stop := launch(t, cmd)
	go func() {
		<-ended
		manager.Close()
	}()
	var message [64]byte
	n, err := manager.Read(message[:])
	if err != nil || string(message[:n]) != "READY=1" {
		t.Fatalf("the service manager got %q, %v, want READY=1\n%s", message[:n], err, logged())
	}
	if r := finish(t, command(t, dir, "status", "--json", "--socket", "s")); r.code != 0 {
		t.Errorf("status after READY=1: exit code %d\n%s", r.code, r.stderr)
	}
	if code := stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// changed is the base file with one key changed, and how its effect is seen.
type changed struct {
	file    string
	reload  bool
	check   func(h *served, key string)
	refusal string // names the key otherwise than by its path
}

// scalars are the single keys that a reload changes. stored names a module of the policy store.
func scalars(h *served) map[string]changed {
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
