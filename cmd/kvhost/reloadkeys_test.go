package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/policy/artifact"
	"github.com/kvhost/kvhost/host/policy/policytest"
	"github.com/kvhost/kvhost/host/proto"
)

// served is a host whose file a test changes.
type served struct {
	*testing.T
	dir, file, http string
	logged          func() string
	signal          func(os.Signal)
	engines         int
}

// base is the file that every change starts from.
func (h *served) base() string {
	return fmt.Sprintf(`socket = "kvhost.sock"
policy_cache = ""
[http]
listen = %q
ready_scan = true
[log]
format = "json"
[store]
evict = "background"
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
	if err := os.WriteFile(h.file, []byte(text), 0o600); err != nil {
		h.Fatal(err)
	}
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

func (h *served) get(path string) (int, string) {
	h.Helper()
	r, err := http.Get("http://" + h.http + path)
	if err != nil {
		h.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		h.Fatal(err)
	}
	return r.StatusCode, string(text)
}

func (h *served) status() *proto.StatusReply {
	h.Helper()
	st, err := ask(h.Context(), &running{socket: filepath.Join(h.dir, "kvhost.sock")}, hostStatus, &proto.StatusRequest{})
	if err != nil {
		h.Fatal(err)
	}
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
	_, metrics := h.get("/metrics")
	limits := regexp.MustCompile(`(?m)^kvhost_limit.*$`).FindAllString(metrics, -1)
	return fmt.Sprintln(b.String(), st.PolicyMemoryLimit, st.Counters["memory_limit_bytes"], limits)
}

func (h *served) metric(series string) string {
	h.Helper()
	_, text := h.get("/metrics")
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, series+" "); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func (h *served) hello(tenant uint32) (*client.Session, error) {
	h.engines++
	return client.Dial(h.Context(), client.Hello{
		Socket: filepath.Join(h.dir, "kvhost.sock"), Engine: fmt.Sprint("e", h.engines), Role: "worker", LocalRanks: 1, Tenant: tenant,
		Namespace: chunk.Namespace{Model: "m", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16,
			Groups: []chunk.Group{{Geometry: chunk.Uniform(2, 2, 1, 64<<10)}}},
	})
}

// greeted is a session that is over, and what its HELLO said.
func (h *served) greeted() (*client.Session, error) {
	s, err := h.hello(0)
	if err == nil {
		s.Close()
	}
	return s, err
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

// register opens a session of a tenant, registers 512 KiB of memory, and calls use with the answer.
func (h *served) register(tenant uint32, use func(*client.Session, error)) {
	h.Helper()
	s, err := h.hello(tenant)
	if err != nil {
		h.Fatal(err)
	}
	defer s.Close()
	arena, err := s.NewArena(8 * 64 << 10)
	if err != nil {
		h.Fatal(err)
	}
	defer arena.Close()
	_, err = s.Register(h.Context(), 0, arena, []client.PlaneRegion{
		{Offset: 0, Stride: 64 << 10, Blocks: 4}, {Offset: 4 * 64 << 10, Stride: 64 << 10, Blocks: 4}})
	use(s, err)
}

// fill stores so many chunks of 256 KiB for a tenant, and returns the number that was refused.
func (h *served) fill(tenant uint32, chunks int) (refused int) {
	h.Helper()
	h.register(tenant, func(s *client.Session, err error) {
		if err != nil {
			h.Fatal(err)
		}
		for range chunks {
			h.engines++
			job, err := s.Store(h.Context(), 1, 0, []client.StoreChunk{{Key: chunk.Key{byte(h.engines), byte(h.engines >> 8), byte(tenant)}, Blocks: []uint32{0, 1}}})
			if err != nil {
				h.Fatal(err)
			}
			if r, err := job.Published(h.Context()); err != nil || r.Bytes == 0 {
				refused++
			}
		}
	})
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

// limit checks a limit that is a metric.
func limit(value string) func(*served, string) {
	return func(h *served, key string) {
		if got := h.metric(fmt.Sprintf("kvhost_limit{key=%q}", key)); got != value {
			h.Errorf("%s is %s, want %s", key, got, value)
		}
	}
}

// change is a new value of a key, in TOML, and how its effect is seen. A key that needs a restart has no check.
type change struct {
	value string
	also  string // lines of the same section
	check func(h *served, key string)
}

func mode(want os.FileMode) func(*served, string) {
	return func(h *served, key string) {
		for _, name := range []string{"kvhost.sock", "kvhost.sock.fd"} {
			if info, err := os.Stat(filepath.Join(h.dir, name)); err != nil || info.Mode().Perm() != want {
				h.Errorf("%s: %s has mode %v: %v", key, name, info.Mode(), err)
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

// exported checks what the log says of where spans go.
func exported(text string) func(*served, string) {
	return func(h *served, key string) {
		lines := regexp.MustCompile(`(?m)^.*"spans are exported".*$`).FindAllString(h.logged(), -1)
		if len(lines) == 0 || !strings.Contains(lines[len(lines)-1], text) {
			h.Errorf("%s: spans are not exported with %s: %q", key, text, lines)
		}
	}
}

const anyPolicy = "[[policy]]\nmodule = \"lru\"\n"

// scalars are the keys that a reload changes.
var scalars = map[string]change{
	"socket_users":  {value: `"12345"`, check: mode(0o666)},
	"socket_groups": {value: `"12345"`, check: mode(0o666)},
	"policy_dir": {value: `"modules"`, also: "", check: func(h *served, key string) {
		if p := h.acting("special"); p == nil {
			h.Errorf("%s: the policies are %v", key, h.status().Policies)
		}
	}},
	"policy_store": {value: `"store"`, check: func(h *served, key string) {
		if p := h.acting("stored"); p == nil {
			h.Errorf("%s: the policies are %v", key, h.status().Policies)
		}
	}},
	"policy_memory": {value: `"512MiB"`, check: func(h *served, key string) {
		if got := h.status().PolicyMemoryLimit; got != 512<<20 {
			h.Errorf("%s is %d", key, got)
		}
	}},
	"max_memory": {value: `"3GiB"`, check: func(h *served, key string) {
		if got := h.status().Counters["memory_limit_bytes"]; got != 3<<30 {
			h.Errorf("%s is %d", key, got)
		}
	}},
	"policy_compile.memory": {value: `"1GiB"`, check: compiles(`"memory":1073741824`)},
	"policy_compile.cpu":    {value: `"59s"`, check: compiles(`"cpu":"59s"`)},
	"policy_compile.time":   {value: `"4m"`, check: compiles(`"time":"4m0s"`)},
	"log.level": {value: `"debug"`, check: func(h *served, key string) {
		before := len(h.logged())
		h.signal(syscall.SIGUSR2) // from debug it goes to info
		h.until("switch of the level", func() bool { return strings.Contains(h.logged()[before:], "log level switched") })
		if text := h.logged()[before:]; !strings.Contains(text, `"to":"INFO"`) {
			h.Errorf("%s was not debug: %s", key, text)
		}
	}},
	"otlp.endpoint":       {value: `"http://127.0.0.1:9"`, check: exported("http://127.0.0.1:9/v1/traces")},
	"otlp.headers_file":   {value: `"headers"`, also: "endpoint = \"http://127.0.0.1:9\"\n", check: exported(`"headers":1`)},
	"otlp.sample_ratio":   {value: "0.25", also: "endpoint = \"http://127.0.0.1:9\"\n", check: exported(`"ratio":0.25`)},
	"otlp.timeout":        {value: `"3s"`, also: "endpoint = \"http://127.0.0.1:9\"\n", check: exported(`"timeout":"3s"`)},
	"http.ready_roots":    {value: `"any"`, check: readyRoots},
	"http.ready_policies": {value: "false", check: nil}, // seen in TestReadyAfterReload
	"http.ready_scan":     {value: "false", check: nil}, // likewise
	"store.high_watermark": {value: "0.2", also: "low_watermark = 0.1\n", check: func(h *served, key string) {
		limit("0.2")(h, key)
		h.until("eviction", func() bool { return h.used(1) <= 64<<20/5 })
	}},
	"store.low_watermark":    {value: "0.5", check: limit("0.5")},
	"move.bandwidth":         {value: `"1GiB"`, check: limit("1.073741824e+09")},
	"move.waiting":           {value: `"1MiB"`, check: limit("1.048576e+06")},
	"move.shutdown":          {value: `"3s"`, check: limit("3")},
	"engine.max_write_queue": {value: `"7s"`, check: limit("7")},
	"session.lease_ttl": {value: `"5s"`, check: func(h *served, key string) {
		if s, err := h.greeted(); err != nil || s.Host().LeaseTTL != 5*time.Second {
			h.Errorf("%s: %v", key, err)
		}
	}},
	"session.max_wait": {value: `"9s"`, check: limit("9")},
	"session.max_sessions": {value: "1", check: func(h *served, key string) {
		defer h.alone(0).Close()
		if _, err := h.hello(0); err == nil {
			h.Errorf("%s: a second session was let in", key)
		}
	}},
	"session.max_keys": {value: "7", check: func(h *served, key string) {
		if s, err := h.greeted(); err != nil || s.Host().Limits.KeysPerLookup != 7 {
			h.Errorf("%s: %v", key, err)
		}
	}},
	"session.max_chunks": {value: "3", check: func(h *served, key string) {
		if s, err := h.greeted(); err != nil || s.Host().Limits.ChunksPerJob != 3 {
			h.Errorf("%s: %v", key, err)
		}
	}},
	"session.max_registered": {value: `"64KiB"`, check: func(h *served, key string) {
		h.register(0, func(_ *client.Session, err error) {
			if !errors.Is(err, client.ErrLimit) {
				h.Errorf("%s: %v", key, err)
			}
		})
	}},
}

// readyRoots has one of two roots go away: with any, the host is ready all the same.
func readyRoots(h *served, key string) {
	away, root := filepath.Join(h.dir, "away"), filepath.Join(h.dir, "b")
	if err := os.Rename(root, away); err != nil {
		h.Fatal(err)
	}
	defer func() {
		if err := os.Rename(away, root); err != nil {
			h.Fatal(err)
		}
		h.until("return of the root", func() bool { return h.status().Roots[1].State == proto.RootState_ROOT_STATE_IN_SERVICE })
	}()
	h.until("loss of the root", func() bool { return h.status().Roots[1].State == proto.RootState_ROOT_STATE_OUT })
	if code, text := h.get("/readyz"); code != http.StatusOK {
		h.Errorf("%s: %d %s", key, code, text)
	}
}

// otherValue is one that a key may have, other than its default, in TOML.
func otherValue(k *config.Key) string {
	switch k.Kind {
	case config.Choice:
		for _, c := range k.Choices {
			if c != k.Default {
				return fmt.Sprintf("%q", c)
			}
		}
	case config.Size:
		return `"2MiB"`
	case config.Duration:
		return `"47s"`
	case config.Count:
		return "3"
	case config.Ratio:
		return "0.5"
	case config.Flag:
		return fmt.Sprint(k.Default != "true")
	}
	return `"other"`
}

// restarts are keys whose other value needs something beside it.
var restarts = map[string]change{
	"socket":                    {value: `"other.sock"`},
	"policy_cache":              {value: `"auto"`},
	"http.listen":               {value: `""`},
	"http.tls_cert":             {value: `"c"`, also: "tls_key = \"k\"\n"},
	"http.tls_key":              {value: `"k"`, also: "tls_cert = \"c\"\n"},
	"log.format":                {value: `"text"`},
	"store.evict":               {value: `"on-demand"`},
	"engine.max_staging_memory": {value: `"32MiB"`},
	"gds.cuda":                  {value: `"auto"`},
	"gds.log_dir":               {value: `"logs"`},
	"store.host_id":             {value: `"other"`},
	"session.max_message":       {value: `"1MiB"`},
	"store.shared_poll":         {value: `"2s"`},
}

// with is the base file with a key changed, and other tables after it.
func (h *served) with(key string, c change, tables string) string {
	section, name, dotted := strings.Cut(key, ".")
	if !dotted {
		section, name = "", key
	}
	line := regexp.MustCompile(`(?m)^` + name + ` = .*\n`)
	parts := regexp.MustCompile(`(?m)^\[`).Split(h.base(), -1)
	found := false
	for i, p := range parts {
		if i == 0 && section == "" || i > 0 && strings.HasPrefix(p, section+"]\n") {
			parts[i], found = line.ReplaceAllString(p, "")+name+" = "+c.value+"\n"+c.also, true
		}
	}
	if !found {
		parts = append(parts, section+"]\n"+name+" = "+c.value+"\n"+c.also)
	}
	return strings.Join(parts, "[") + tables
}

// Every key of the configuration either changes a running host, or is refused by its name and changes nothing.
func TestReloadOfEachKey(t *testing.T) {
	dir := shortDir(t)
	h := &served{T: t, dir: dir, file: filepath.Join(dir, "k.toml")}
	for from, to := range map[string]string{"fifo": "special", "lru": "lru", "fanout": "fanout", "clock": "clock"} {
		module, err := os.ReadFile(filepath.Join(policytest.Dir(t, "fifo", "lru", "fanout", "clock"), from+".wasm"))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(dir, "modules"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "modules", to+".wasm"), module, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	module, err := os.ReadFile(filepath.Join(dir, "modules", "lru.wasm"))
	if err != nil {
		t.Fatal(err)
	}
	a, err := artifact.Pack("stored", module, nil)
	if err != nil {
		t.Fatal(err)
	}
	stored := artifact.Reference{Registry: "registry.example.com", Repository: "stored", Digest: a.Digest}
	if _, err := artifact.Write(t.Context(), filepath.Join(dir, "store"), stored, a, func(string) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "headers"), []byte("X-Tenant: a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	base := h.base() + baseRoots
	if err := os.WriteFile(h.file, []byte(base), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, logged, stop := startHost(t, dir, "--config", h.file)
	h.http = httpAddress(t, logged)
	h.logged, h.signal = logged, func(s os.Signal) { cmd.Process.Signal(s) }
	if n := h.fill(0, 80); n > 0 {
		t.Fatalf("%d of 80 chunks refused", n)
	}
	tried := map[string]bool{}
	try := func(key, text string, reload bool, check func(*served, string), refusal string) {
		tried[key] = true
		before := h.settled()
		ok, line := h.reload(text)
		switch {
		case ok != reload:
			t.Errorf("%s: %s", key, line)
		case !reload && (!strings.Contains(line, cmp.Or(refusal, key)) || h.settled() != before):
			t.Errorf("%s: refused by another name, or something changed: %s", key, line)
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
	for _, k := range config.Keys() {
		key, c := k.Path(), change{value: otherValue(k)}
		if w, ok := restarts[key]; ok {
			c = w
		}
		if w, ok := scalars[key]; ok {
			c = w
		} else if k.Reload {
			t.Errorf("%s: nothing says how its effect is seen", key)
			continue
		}
		tables := baseRoots
		if strings.HasPrefix(key, "policy_compile.") {
			tables += anyPolicy
		} else if key == "policy_dir" {
			tables += "[[policy]]\nmodule = \"special\"\n"
		} else if key == "policy_store" {
			tables += fmt.Sprintf("[[policy]]\nmodule = %q\n", stored)
		}
		try(key, h.with(key, c, tables), k.Reload, c.check, "")
	}
	for key, text := range fieldFiles(h) {
		try(key, text.file, text.reload, text.check, text.refusal)
	}
	for _, array := range config.Arrays() {
		for _, f := range config.Fields(array) {
			if !tried[array+"[0]."+f.Name] {
				t.Errorf("%s.%s was not tried", array, f.Name)
			}
		}
	}
	if code := stop(syscall.SIGTERM); code != 0 {
		t.Errorf("the host ended with %d", code)
	}
}
