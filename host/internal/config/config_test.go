package config

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/regular"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write examples/kvhost.toml")

const examplePath = "../../../examples/kvhost.toml"

// The example file lists exactly the known keys, each at its default.
func TestExampleFile(t *testing.T) {
	var want bytes.Buffer
	testenv.OK(t, Example(&want))
	if *update {
		testenv.OK(t, os.WriteFile(examplePath, want.Bytes(), 0o644))
	}
	got, err := os.ReadFile(examplePath)
	testenv.OK(t, err)
	if !bytes.Equal(got, want.Bytes()) {
		t.Fatalf("%s is not what kvhost config --defaults prints: go test ./host/internal/config -update", examplePath)
	}
	l, err := Load(Source{File: examplePath})
	testenv.OK(t, err)
	if !reflect.DeepEqual(&l.Config, Default()) {
		t.Errorf("the example says %+v, the defaults are %+v", l.Config, *Default())
	}
	for _, k := range Keys() {
		if l.Origins[k.Path()].From != FromFile {
			t.Errorf("the example does not set %s", k.Path())
		}
	}
	for _, a := range arrays {
		for _, name := range namesOf(a.keys) {
			if !regexp.MustCompile(`(?m)^[# ]*(\[` + a.name + `\.)?` + name + `(\]| = )`).Match(got) {
				t.Errorf("the example does not mention %s of %s", name, a.name)
			}
		}
	}
}

// The comments of the example say of each key what its tags and its value do.
func TestExampleComments(t *testing.T) {
	for _, k := range keys {
		want := "Default: " + k.toml(k.field(Default())) + "."
		if k.Kind == Choice {
			want = "One of: " + strings.Join(k.Choices, ", ") + ". " + want
		}
		if !strings.HasSuffix(comments[k.Path()], want) {
			t.Errorf("the example says of %s %q, want it to end with %q", k.Path(), comments[k.Path()], want)
		}
	}
}

// docs/reference.md has the table of keys that a reload changes.
func TestReloadTable(t *testing.T) {
	const path, begin, end = "../../docs/reference.md", "<!-- reload: go test ./host/internal/config -update -->\n", "<!-- end of reload -->"
	text, err := os.ReadFile(path)
	testenv.OK(t, err)
	head, rest, found := strings.Cut(string(text), begin)
	have, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no table between %q and %q", path, begin, end)
	}
	want := reloadTable()
	if *update {
		testenv.OK(t, os.WriteFile(path, []byte(head+begin+want+end+tail), 0o644))
	} else if have != want {
		t.Errorf("%s has another table than the keys: go test ./host/internal/config -update", path)
	}
}

// The commented [[policy]] block is valid configuration.
func TestExamplePolicyBlock(t *testing.T) {
	var text strings.Builder
	testenv.OK(t, Example(&text))
	_, block, _ := strings.Cut(text.String(), "#\n# [[policy]]\n")
	block, _, _ = strings.Cut(block, "\n\n")
	l := &Loaded{Config: *Default(), Origins: map[string]Origin{}}
	testenv.OK(t, l.applyText("example", "[[policy]]\n"+strings.ReplaceAll("\n"+block, "\n# ", "\n")))
	if len(l.Config.Policies) != 1 || l.Config.Policies[0].Module != "lru.wasm" {
		t.Fatalf("policies %+v", l.Config.Policies)
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "k.toml")
	testenv.OK(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestPrecedence(t *testing.T) {
	file := write(t, `
socket = "from-file.sock"
[log]
level = "warn"
format = "json"
[engine]
slot_bytes = 1048576
max_staging_memory = "1GiB"
[session]
lease_ttl = "5s"
[[policy]]
module = "a.wasm"
roles = ["evict"]
[policy.config]
window = 3
[policy.config.deep]
on = true
[[policy]]
module = "b.wasm"
[[root]]
path = "/data/0"
capacity = "1.5GiB"
shared = true
`)
	l, err := Load(Source{
		File: file,
		Env: []string{"KVHOST_LOG_LEVEL=debug", "KVHOST_LOG_FORMAT=text", "HOME=/root",
			"KVHOST_LOGLEVEL=debug"},
		Flags: []Setting{{"log.level", "error"}, {"policy", "a.wasm"}, {"policy", "c.wasm"}},
	})
	testenv.OK(t, err)
	c := l.Config
	if c.Socket != "from-file.sock" || c.Log.Level != "error" || c.Log.Format != "text" ||
		c.Engine.SlotBytes != 1<<20 || c.Engine.MaxStagingMemory != 1<<30 || c.Session.LeaseTTL != 5*time.Second {
		t.Errorf("loaded configuration: got %+v", c)
	}
	wantPolicies := []Policy{
		{Module: "a.wasm", Roles: []string{"evict"}, Config: map[string]string{"window": "3", "deep.on": "true"}},
		{Module: "c.wasm"},
	}
	if !reflect.DeepEqual(c.Policies, wantPolicies) {
		t.Errorf("policies %+v, want %+v", c.Policies, wantPolicies)
	}
	if want := []Root{{Path: "/data/0", Capacity: 3 << 29, Shared: true,
		Route: RouteAuto}}; !reflect.DeepEqual(c.Roots, want) {
		t.Errorf("roots %+v, want %+v", c.Roots, want)
	}
	for path, want := range map[string]string{
		"socket":               "file " + file + ":2",
		"session.lease_ttl":    "file " + file + ":10",
		"log.level":            "flag --log-level",
		"log.format":           "env KVHOST_LOG_FORMAT",
		"http.listen":          "default",
		"policy[1]":            "flag --policy",
		"root[0]":              "file " + file + ":20",
		"session.max_sessions": "default",
	} {
		if got := l.Origins[path].String(); got != want {
			t.Errorf("origin of %s is %q, want %q", path, got, want)
		}
	}
	if len(l.Warnings) != 1 || !strings.Contains(l.Warnings[0], "KVHOST_LOGLEVEL") {
		t.Errorf("warnings %q", l.Warnings)
	}
}

// Engines read KVHOST_BIN, and Kubernetes sets variables for each Service, some of whose names begin as the settings' do.
func TestVariablesOfOthers(t *testing.T) {
	env := []string{"KVHOST_BIN=/usr/bin/kvhost"}
	for _, service := range []string{"KVHOST", "KVHOST_PEERS", "KVHOST_LOG"} {
		env = append(env, service+"_SERVICE_HOST=10.0.0.1", service+"_SERVICE_PORT=7481", service+"_SERVICE_PORT_METRICS=7481",
			service+"_PORT=tcp://10.0.0.1:7481", service+"_PORT_7481_TCP=tcp://10.0.0.1:7481", service+"_PORT_7481_TCP_PROTO=tcp",
			service+"_PORT_7481_TCP_PORT=7481", service+"_PORT_7481_TCP_ADDR=10.0.0.1")
	}
	l, err := Load(Source{Env: env})
	testenv.OK(t, err)
	if len(l.Warnings) != 1 || !strings.HasPrefix(l.Warnings[0], "KVHOST_SERVICE_HOST and 23 more variables are of Kubernetes' Services") {
		t.Errorf("variables of three Services and of engines: warnings %q, want one on all of them", l.Warnings)
	}
	l, err = Load(Source{Env: []string{"KVHOST_PORT=7480", "KVHOST_BINARY=/usr/bin/kvhost"}})
	testenv.OK(t, err)
	if len(l.Warnings) != 2 {
		t.Errorf("variables of nothing known: warnings %q, want one on each", l.Warnings)
	}
	for _, k := range keys {
		if serviceLink.MatchString(EnvName(k.Path()) + "=tcp://") {
			t.Errorf("the setting %s is taken for a variable of Kubernetes'", k.Path())
		}
	}
}

func TestListsFromEnvironmentAndFlags(t *testing.T) {
	l, err := Load(Source{
		Env:   []string{"KVHOST_POLICY=lru.wasm, fanout.wasm", "KVHOST_ROOT=/a=1GB,/b"},
		Flags: []Setting{{"root", "/c=16KiB"}, {"root", "/d"}},
	})
	testenv.OK(t, err)
	if got := l.Config.Policies; len(got) != 2 || got[0].Module != "lru.wasm" || got[1].Module != "fanout.wasm" {
		t.Errorf("policies %+v", got)
	}
	if want := []Root{{Path: "/c", Capacity: 16 << 10, Route: RouteAuto},
		{Path: "/d", Capacity: 10 << 30, Route: RouteAuto}}; !reflect.DeepEqual(l.Config.Roots, want) {
		t.Errorf("roots %+v, want %+v", l.Config.Roots, want)
	}
}

// A capacity may be a part of its file system.
func TestParts(t *testing.T) {
	dir := t.TempDir()
	var s unix.Statfs_t
	testenv.OK(t, unix.Statfs(dir, &s))
	l, err := Load(Source{File: write(t, "[[root]]\npath = '"+dir+"/old'\ncapacity = '50%'\n[[root]]\npath = '"+dir+"/new'\ncapacity = '25%'\n")})
	testenv.OK(t, err)
	total := int64(s.Blocks) * int64(s.Bsize)
	if a, b := l.Config.Roots[0].Capacity, l.Config.Roots[1].Capacity; a != total/2>>20<<20 || b != total/4>>20<<20 {
		t.Errorf("%d and %d of %d", a, b, total)
	}
}

// What was not set is marked, line for line.
func TestPrintMarksDefaults(t *testing.T) {
	l, err := Load(Source{})
	testenv.OK(t, err)
	var out bytes.Buffer
	testenv.OK(t, l.Print(&out))
	for line := range strings.Lines(out.String()) {
		if strings.TrimSpace(line) != "" && !strings.HasSuffix(line, "# default\n") {
			t.Errorf("line without \"# default\": %q", line)
		}
	}
}

// The printed configuration reads back as the same, and says where each value comes from.
func TestPrintReadsBack(t *testing.T) {
	file := write(t,
		"[http]\nlisten = \"\"\n[[policy]]\nmodule = 'we\\ird\"name.wasm'\ngrants = [\"clock\"]\nsha256 = \""+strings.Repeat("Ab", 32)+"\"\npublic_key = \"RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\"\non_fault = \"stop\"\nmemory_pages = 7\nfuel = {record = 9, time = \"7ms\"}\nconfig = { a = \"x y\", \"b.c\" = 1.5 }\n[[root]]\npath = \"r\"\ncapacity = 12345\nrequire_mount = true\nmin_free = \"2.5%\"\ndaily_writes = \"3GiB\"\n[[tenant]]\nid = \"3-9\"\nquota = \"20%\"\n[[tenant]]\nid = \"*\"\nquota = \"1GiB\"\n[[tenant]]\nid = 4\nuids = [1001, 1002]\nprivate = true\nsessions = 3\n[[expiry]]\nmodel = \"a/*\"\nttl = \"36h\"\n[[compression]]\nnamespaces = [\"a/*\", \"dtype=bf16\"]\nmode = \"auto\"\n")
	l, err := Load(Source{File: file, Env: []string{"KVHOST_STORE_DURABILITY=strict"},
		Flags: []Setting{{"session.lease_ttl", "90s"}}})
	testenv.OK(t, err)
	var out bytes.Buffer
	testenv.OK(t, l.Print(&out))
	for _, want := range []string{
		"lease_ttl = \"1m30s\" # flag --session-lease-ttl", "durability = \"strict\" # env KVHOST_STORE_DURABILITY",
		"listen = \"\" # file " + file, "max_sessions = 0 # default",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	again, err := Load(Source{File: write(t, out.String())})
	if err != nil {
		t.Fatalf("read back: %v in\n%s", err, out.String())
	}
	if !reflect.DeepEqual(again.Config, l.Config) {
		t.Errorf("read back %+v, want %+v", again.Config, l.Config)
	}
}

// Sizes may be written as other tools take them.
func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "4096": 4096, "64KiB": 65536, "1.5 GiB": 3 << 29, "2GB": 2e9, "10 B": 10, " 7 ": 7,
		"100GiB": 100 << 30, "9223372036854775807": 1<<63 - 1, "10G": 10 << 30, "10g": 10 << 30, "3T": 3 << 40, "64k": 64 << 10,
		"1.5M": 3 << 19,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "-1", "x", "1.5", "KiB", "1e3", "0x10", "9223372036854775808", "9000PiB",
		"nanGiB", "infGB", "1 2KiB"} {
		if got, err := ParseSize(text); !errors.Is(err, ErrValue) {
			t.Errorf("ParseSize(%q) = %d, %v; want an error", text, got, err)
		}
	}
	for _, n := range []int64{0, 1, 1023, 1 << 10, 3 << 29, 1 << 40, 1<<63 - 1} {
		if got, err := ParseSize(FormatSize(n)); err != nil || got != n {
			t.Errorf("ParseSize(FormatSize(%d)) = %d, %v", n, got, err)
		}
	}
}

func TestDistance(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"level", "level", 0}, {"levle", "level", 1}, {"lvl", "level", 2}, {"", "abc", 3},
		{"socket", "root", 4}} {
		if got := distance(test.a, test.b); got != test.want {
			t.Errorf("distance(%q, %q) = %d, want %d", test.a, test.b, got, test.want)
		}
	}
}

func TestCloneSharesNothing(t *testing.T) {
	c := Default()
	c.Policies = []Policy{{Module: "a", Roles: []string{"evict"}, Config: map[string]string{"k": "v"}}}
	d := c.Clone()
	d.Roots[0].Path, d.Policies[0].Roles[0], d.Policies[0].Config["k"] = "x", "x", "x"
	if c.Roots[0].Path != "kvhost-data" || c.Policies[0].Roles[0] != "evict" || c.Policies[0].Config["k"] != "v" {
		t.Errorf("the original changed: %+v", c)
	}
}

// No text makes the reader panic or hang. An accepted text prints and reads back as the same configuration.
func FuzzFile(f *testing.F) {
	var example strings.Builder
	testenv.OK(f, Example(&example))
	for _, seed := range []string{
		example.String(), "[[policy]]\nmodule='a'\n[policy.config]\nx={y=1}\n", "a=[[[",
		"[a.b]\nc=\"\"\"x\\\"\"\"\"\"\n", "x={a=1,b=[{c=2}]}",
		"'q.k'.\"d\"=1", "[[root]]\npath='''x'''\ncapacity='1GiB'",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		l := &Loaded{Config: *Default(), Origins: map[string]Origin{}}
		if l.applyText("f", text) != nil || l.validate() != nil {
			return
		}
		var out bytes.Buffer
		testenv.OK(t, l.Print(&out))
		again := &Loaded{Config: *Default(), Origins: map[string]Origin{}}
		if err := again.applyText("f", out.String()); err != nil {
			t.Fatalf("%v reading back\n%s", err, out.String())
		}
		var twice bytes.Buffer
		testenv.OK(t, again.Print(&twice))
		if strip(out.String()) != strip(twice.String()) {
			t.Fatalf("printed\n%s\nand then\n%s", out.String(), twice.String())
		}
	})
}

// strip removes the origin comments, and the empty lines that depend on them.
func strip(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if i := strings.LastIndex(line, " # "); i >= 0 {
			line = line[:i] + "\n"
		}
		b.WriteString(strings.TrimPrefix(line, "\n"))
	}
	return b.String()
}

// A configuration that is a FIFO, as by a mistaken path, must not hang a start or a reload.
func TestFileIsRegular(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "kvhost.toml")
	testenv.OK(t, unix.Mkfifo(fifo, 0o600))
	for _, name := range []string{fifo, "/dev/zero", t.TempDir()} {
		done := make(chan error, 1)
		go func() {
			_, err := Load(Source{File: name})
			done <- err
		}()
		if err := testenv.Receive(t, "the end of reading "+name, done); !errors.Is(err, ErrFile) || !errors.Is(err, regular.ErrNotRegular) {
			t.Errorf("load %s: got error %v, want that it is no regular file", name, err)
		}
	}
}

// reloadTable says, in Markdown, which keys SIGHUP changes in a running host.
func reloadTable() string {
	var b strings.Builder
	b.WriteString("| keys | SIGHUP applies |\n|---|---|\n")
	row := func(name string, list []*Key) {
		var applied []string
		for _, k := range list {
			if k.Reload {
				applied = append(applied, "`"+k.Name+"`")
			}
		}
		if len(applied) > 0 {
			fmt.Fprintf(&b, "| %s | %s |\n", name, strings.Join(applied, ", "))
		}
	}
	for _, section := range append([]string{""}, sections()...) {
		list := slices.DeleteFunc(slices.Clone(keys), func(k *Key) bool { return k.Section != section })
		name := "`[" + section + "]`"
		if section == "" {
			name = "top level"
		}
		row(name, list)
	}
	for _, a := range arrays {
		row("`[["+a.name+"]]`", a.keys)
	}
	return b.String()
}

// A key that a running host cannot change is refused by its name.
func TestChangesThatNeedARestart(t *testing.T) {
	for _, k := range keys {
		next := Default()
		switch p := k.field(next).Addr().Interface().(type) {
		case *string:
			*p += "x"
		case *bool:
			*p = !*p
		case *float64:
			*p /= 2
		case *int:
			*p++
		case *int64:
			*p++
		case *time.Duration:
			*p++
		}
		if got := Changes(Default(), next); len(got) != 1 || got[0].Key != k.Path() || (got[0].Restart == "") != k.Reload {
			t.Errorf("another value of %s: got %+v, want one change, reloaded %v", k.Path(), got, k.Reload)
		}
	}
	for key, value := range map[string]any{"path": "x", "level": int64(1), "write": "through", "shared": true, "require_mount": true,
		"route": RouteStaged, "capacity": "1GiB", "evict": "x", "min_free": "5%", "daily_writes": "1GiB"} {
		next := Default()
		roots := arrayNamed("root")
		testenv.OK(t, roots.set(&next.Roots[0], key, value))
		reload := keyNamed(roots.keys, key).Reload
		if got := Changes(Default(), next); len(got) != 1 || got[0].Key != "root[0]."+key || (got[0].Restart == "") != reload {
			t.Errorf("another %s of a root: got %+v, want one change, reloaded %v", key, got, reload)
		}
	}
	next := Default()
	next.Roots = append(next.Roots, Root{Path: "more"})
	next.Expiries, next.Compressions = []Expiry{{Model: "m"}}, []Compression{{Mode: CompressionAuto}}
	if got := Changes(Default(), next); len(got) != 3 || got[0].Restart == "" || got[1].Restart == "" || got[2].Restart == "" {
		t.Errorf("a further root, expiry and compression: got %+v, want three that need a restart", got)
	}
	next = Default()
	next.Policies, next.Tenants = []Policy{{Module: "m"}}, []Tenant{{Sessions: 1}}
	if got := Changes(Default(), next); len(got) != 2 || got[0].Restart != "" || got[1].Restart != "" {
		t.Errorf("a policy and a tenant: got %+v, want two that are reloaded", got)
	}
}

// A socket has a place whatever the length of TMPDIR.
func TestSocketDir(t *testing.T) {
	for _, n := range []int{1, 20} {
		temp := filepath.Join(t.TempDir(), strings.Repeat("long-name/", n))
		testenv.OK(t, os.MkdirAll(temp, 0o700))
		t.Setenv("TMPDIR", temp)
		dir, err := SocketDir("kvhost-test-")
		testenv.OK(t, err)
		testenv.NoError(t, os.Remove(dir))
		if left, err := os.ReadDir(temp); err != nil || len(left) > 0 || len(dir)+2 > MaxSocketPath {
			t.Errorf("TMPDIR of %d bytes: %s, and %v is left in it, %v; want a path that is short enough, and nothing left", len(temp), dir, left, err)
		}
	}
}

// FuzzValues reads sizes, amounts and tenants, and writes them again.
func FuzzValues(f *testing.F) {
	for _, s := range []string{"", "0", "1.5GiB", "2TiB", "5%", "100.1%", "NaN%", "9223372036854775807", "9000PiB", "-1", "3-9", "*", "1e3KiB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := ParseSize(text); err == nil {
			if again, err := ParseSize(FormatSize(n)); n < 0 || err != nil || again != n {
				t.Errorf("%q is %d, written %q, read %d, %v", text, n, FormatSize(n), again, err)
			}
		}
		if a, err := parseAmount(text); err == nil {
			if again, err := parseAmount(a.String()); a.Bytes < 0 || !(a.Part >= 0 && a.Part <= 1) || err != nil || a.Part == 0 && again != a {
				t.Errorf("%q is %+v, written %q, read %+v, %v", text, a, a.String(), again, err)
			}
		}
		if first, last, err := parseTenants(text); err == nil {
			tenant := TenantIDs{First: first, Last: last}
			if a, b, err := parseTenants(tenant.ID()); first > last || err != nil || a != first || b != last {
				t.Errorf("%q is %d to %d, written %q", text, first, last, tenant.ID())
			}
		}
	})
}

func TestMemoryBefore(t *testing.T) {
	const gib = 1 << 30
	for name, c := range map[string]struct {
		setting   string
		available int64
		change    func(*Config)
		want      int64
	}{
		"a quarter of what is available":         {"auto", 64 * gib, nil, 16 * gib},
		"half of the roots":                      {"auto", 1000 * gib, nil, 50 * gib},
		"a small machine":                        {"auto", 1000 << 20, nil, 250 << 20},
		"a smaller one":                          {"auto", 500 << 20, nil, 0},
		"a machine that does not say":            {"auto", 0, nil, 0},
		"off":                                    {"0", 64 * gib, nil, 0},
		"a size":                                 {"3GiB", 1 * gib, nil, 3 * gib},
		"levels are arranged":                    {"auto", 64 * gib, func(c *Config) { c.Roots[1].Level = 1 }, 0},
		"a root is in memory":                    {"auto", 64 * gib, func(c *Config) { c.Roots[1].Path = "memory:" }, 0},
		"a publication promises a disk":          {"auto", 64 * gib, func(c *Config) { c.Store.Durability = DurabilityStrict }, 0},
		"a size where levels are arranged":       {"1GiB", 64 * gib, func(c *Config) { c.Roots[1].Level = 1 }, 1 * gib},
		"a size though a disk is promised later": {"1GiB", 64 * gib, func(c *Config) { c.Store.Durability = DurabilityStrict }, 1 * gib},
	} {
		l, err := Load(Source{Env: []string{"KVHOST_STORE_MEMORY=" + c.setting, "KVHOST_ROOT=/a=60GiB,/b=40GiB"}})
		if err != nil {
			t.Errorf("%s: store.memory = %s: %v", name, c.setting, err)
			continue
		}
		if c.change != nil {
			c.change(&l.Config)
		}
		if got := l.Config.MemoryBefore(c.available); got != c.want {
			t.Errorf("%s: MemoryBefore(%d) = %d, want %d", name, c.available, got, c.want)
		}
	}
}

func TestWithMemory(t *testing.T) {
	c := Default()
	c.Roots = []Root{{Path: "/a", Capacity: 1 << 30}, {Path: "/b", Capacity: 1 << 30, Level: 1}}
	with := c.WithMemory(1 << 20)
	if err := with.Validate(); err != nil {
		t.Errorf("a configuration with memory is not valid: %v", err)
	}
	if got := []int{with.Roots[0].Level, with.Roots[1].Level, with.Roots[2].Level}; got[0] != 1 || got[1] != 2 || got[2] != 0 ||
		with.Roots[2].Kind() != Memory || with.Roots[2].Write != WriteThrough {
		t.Errorf("roots with memory are %+v, want the memory nearest, written through, and the others one level farther", with.Roots)
	}
	if c.Roots[0].Level != 0 || len(c.Roots) != 2 || c.WithMemory(0) != c {
		t.Errorf("the configuration itself has changed: %+v", c.Roots)
	}
}

// TestPeers: what could be read on the way, or is no address, is refused by the key.
func TestPeers(t *testing.T) {
	for want, p := range map[string]Peers{
		"":             {Hosts: "127.0.0.1:1, [::1]:2,a.example:3", Listen: "127.0.0.1:9477"},
		"peers.cert":   {Listen: "127.0.0.1:9477", Cert: "c", Key: "k"},
		"peers.listen": {Listen: "0.0.0.0:9477"},
		"peers.hosts":  {Hosts: "127.0.0.1:1,192.0.2.1:9477"},
		"peers.hosts:": {Hosts: "127.0.0.1"},
	} {
		var said []string
		p.validate(func(wrong bool, path, _ string, _ ...any) {
			if wrong {
				said = append(said, path)
			}
		})
		if got := strings.Join(said, " "); got != strings.TrimSuffix(want, ":") {
			t.Errorf("%+v is refused by %q, want %q", p, got, want)
		}
	}
	remote := Peers{Hosts: "192.0.2.1:9477", Listen: "0.0.0.0:9477", Cert: "c", Key: "k", CA: "a"}
	remote.validate(func(wrong bool, path, format string, args ...any) {
		if wrong {
			t.Errorf("%s: "+format, append([]any{path}, args...)...)
		}
	})
	if list := (&Peers{Hosts: " a:1, ,b:2,"}).List(); strings.Join(list, " ") != "a:1 b:2" {
		t.Errorf("hosts %q, want a:1 and b:2", list)
	}
	c := Default()
	c.Roots = []Root{{Path: "/kv", Capacity: 1 << 30, Level: maxLevel}}
	c.Peers.Hosts = "127.0.0.1:1"
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "root[0].level") {
		t.Errorf("a root of the highest level before that of peers: %v, want root[0].level refused", err)
	}
}

func TestPins(t *testing.T) {
	file := write(t,
		"[session]\nmax_sessions = 8\n[session.pins]\ndtype = \"bf16\"\ntensor_parallel = 8\nreplicated = true\n\"group.0\" = \"prefix x\"\n[session.pins.extra]\nlora = \"a # b\"\n")
	l, err := Load(Source{File: file})
	testenv.OK(t, err)
	want := map[string]string{"dtype": "bf16", "tensor_parallel": "8", "replicated": "true", "group.0": "prefix x",
		"extra.lora": "a # b"}
	if got := l.Config.Session.Pins; !reflect.DeepEqual(got, want) {
		t.Fatalf("pins %q, want %q", got, want)
	}
	var out bytes.Buffer
	testenv.OK(t, l.Print(&out))
	if !strings.Contains(out.String(), "\"dtype\" = \"bf16\" # file "+file+":4\n") {
		t.Errorf("no origin in\n%s", out.String())
	}
	again, err := Load(Source{File: write(t, out.String())})
	if err != nil || !reflect.DeepEqual(again.Config, l.Config) {
		t.Errorf("read back %+v, %v", again, err)
	}
	l.Config.Clone().Session.Pins["dtype"] = "x"
	if l.Config.Session.Pins["dtype"] != "bf16" {
		t.Error("a clone shares the pins")
	}
}

// The commented table of the example is valid configuration, and names every field.
func TestExamplePins(t *testing.T) {
	_, pins, _ := strings.Cut(example, "# Fields that the namespace")
	pins, _, _ = strings.Cut(pins, "\n\n")
	for _, name := range pinFields {
		if !strings.Contains(pins, name) {
			t.Errorf("the example does not mention %s", name)
		}
	}
	_, table, _ := strings.Cut(pins, "#\n# ")
	l, err := Load(Source{File: write(t, strings.ReplaceAll(table, "\n# ", "\n"))})
	if err != nil || l.Config.Session.Pins["tensor_parallel"] != "8" {
		t.Errorf("load the example: got %v, %v", l, err)
	}
}

// The configuration knows the fields that a namespace has.
func TestPinFields(t *testing.T) {
	var have []string
	for line := range strings.Lines((&kv.Namespace{}).Text() + (&kv.Namespace{Units: 1}).Text()) {
		name, _, _ := strings.Cut(line, "=")
		have = append(have, name)
	}
	slices.Sort(have)
	have = slices.Compact(have)
	if want := slices.Sorted(slices.Values(pinFields)); !slices.Equal(have, want) {
		t.Errorf("a namespace has %q, the configuration takes %q", have, want)
	}
}

// Variables of other caches are named at the start, with what kvhost has for each, and the page of names has them, too.
func TestOthersNames(t *testing.T) {
	page, err := os.ReadFile("../../docs/names.md")
	testenv.OK(t, err)
	example, err := os.ReadFile("../../../examples/kvhost.toml")
	testenv.OK(t, err)
	for _, key := range regexp.MustCompile("`(?:[a-z]+)\\.([a-z_]+)(?: = [^`]*)?`").FindAllStringSubmatch(string(page), -1) {
		if !regexp.MustCompile(`(?m)^(# )?` + key[1] + ` = `).Match(example) {
			t.Errorf("host/docs/names.md has %s, which is no key", key[0])
		}
	}
	var environ []string
	for name, ours := range othersNames {
		environ = append(environ, name+"=1")
		if !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("host/docs/names.md does not name %s", name)
		}
		if key, _, _ := strings.Cut(ours, ","); strings.Contains(key, ".") && !strings.Contains(string(page), "`"+key+"`") {
			t.Errorf("%s: %s is not in host/docs/names.md", name, key)
		}
	}
	l, err := Load(Source{Env: append(environ, "LMCACHE_TRACK_USAGE=false", "CUFILE_ENV_PATH_JSON=x"), Flags: []Setting{{Key: "store.memory", Value: "0"}}})
	testenv.OK(t, err)
	if said := strings.Join(l.Warnings, "\n"); len(l.Warnings) != len(othersNames) || !strings.Contains(said, "LMCACHE_LOCAL_DISK is set") {
		t.Errorf("%d warnings of %d variables:\n%s", len(l.Warnings), len(othersNames), said)
	}
}

// Roots are taken as people spell them, and what is no directory says so.
func TestRootsAsSpelled(t *testing.T) {
	for _, c := range []struct{ text, path, refused string }{
		{text: "/x/kv=64MiB", path: "/x/kv"},
		{text: "/x/kv/=64MiB", path: "/x/kv"},
		{text: "/x/kv//", path: "/x/kv"},
		{text: "/x/dt=2026/kv=64MiB", path: "/x/dt=2026/kv"},
		{text: "/x/dt=2026/kv", path: "/x/dt=2026/kv"},
		{text: "/=1GiB", path: "/"},
		{text: "/x/dt=2026/", path: "/x/dt=2026"},
		{text: "/x/dt=a=64MiB", path: "/x/dt=a"},
		{text: "/x/dt=a", refused: "a path with = in its last name ends in /"},
		{text: "./memory:=64MiB", path: "./memory:"},
		{text: "./memroy:=64MiB", path: "./memroy:"},
		{text: "./~/kv=64MiB", path: "./~/kv"},
		{text: "/a:b/kv=64MiB", path: "/a:b/kv"},
		{text: "memroy:=64MiB", refused: `"memroy:" is no kind of root`},
		{text: "S3://bucket/x=64MiB", refused: `"S3://bucket/x" is no kind of root`},
		{text: "~/kv=64MiB", refused: "only a shell knows the directory ~"},
		{text: "$HOME/kv=64MiB", refused: "only a shell replaces the variable"},
		{text: "./$HOME/kv=64MiB", path: "./$HOME/kv"},
		{text: "/x/kv=64MiBB", refused: "64MiBB"},
	} {
		l, err := Load(Source{Flags: []Setting{{Key: "root", Value: c.text}, {Key: "store.memory", Value: "0"}}})
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("--root %s: got %v, want an error with %q", c.text, err, c.refused)
			}
			continue
		}
		if err != nil || l.Config.Roots[0].Path != c.path {
			t.Errorf("--root %s: got %v, %v, want the path %q", c.text, l, err, c.path)
		}
	}
}
