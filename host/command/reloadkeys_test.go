package command

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
)

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
	"engine.max_staging_memory": {value: `"32MiB"`},
	"gds.cuda":                  {value: `"auto"`},
	"gds.log_dir":               {value: `"logs"`},
	"store.host_id":             {value: `"other"`},
	"session.max_message":       {value: `"1MiB"`},
	"store.shared_poll":         {value: `"2s"`},
	"otlp.endpoint":             {value: `"http://127.0.0.1:9"`},
	"otlp.headers_file":         {value: `"headers"`},
	"socket_users":              {value: `"12345"`},
	"socket_groups":             {value: `"12345"`},
	"max_memory":                {value: `"3GiB"`},
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
	t.Parallel() // it waits more than it works
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
	base := h.base() + baseRoots
	if err := os.WriteFile(h.file, []byte(base), 0o600); err != nil {
		t.Fatal(err)
	}
	host := command(t, dir, "--config", h.file)
	host.Env = slices.DeleteFunc(host.Env, func(v string) bool { return v == noMemory }) // a variable overrides the file
	cmd, logged, stop := startCommand(t, host)
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
