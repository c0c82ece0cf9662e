package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/proto"
)

// change is a new value of a key, in TOML, and how its effect is seen. A key that needs a restart has no check.
type change struct {
	value string
	also  string // lines of the same section
	check func(h *served, key string)
}

// limit checks a limit that is a metric.
func limit(value string) func(*served, string) {
	return func(h *served, key string) {
		if got := h.metric(fmt.Sprintf("kvhost_limit{key=%q}", key)); got != value {
			h.Errorf("%s is %s, want %s", key, got, value)
		}
	}
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
