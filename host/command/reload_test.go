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

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
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
policy_cache = %q
[http]
listen = %q
ready_scan = true
[log]
format = "json"
[engine]
max_staging_memory = "16MiB"
[gds]
cuda = "off"
`, filepath.Join(h.dir, "cache"), anyPort)
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
	for _, limit := range compileLimits { // with a section of its own: it is compiled when its turn comes
		module := append(wasmtest.Harmless(abi.RoleEvict), wasmtest.Custom(limit)...)
		testenv.OK(t, os.WriteFile(filepath.Join(dir, "modules", limit+".wasm"), module, 0o600))
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
		{base + "capacity = '32MiB'\n[session]\nmax_keys = 5\n", exitUsage, "session.max_keys needs a restart"},
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
