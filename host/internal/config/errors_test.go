package config

import (
	"errors"
	"os"
	"strings"
	"testing"
)

func TestErrors(t *testing.T) {
	for _, test := range []struct {
		name, text string
		env        []string
		flags      []Setting
		is         error
		want       []string
	}{
		{name: "not TOML", text: "a = \n", is: ErrFile, want: []string{"k.toml:1:"}},
		{name: "duplicate", text: "socket = 'a'\nsocket = 'b'\n", is: ErrFile, want: []string{"k.toml:2:", "already"}},
		{name: "unknown key", text: "\n[log]\nlevle = \"info\"\n", is: ErrKey,
			want: []string{"k.toml:", "log.levle", `"level"`}},
		{name: "syntax", text: "[log]\nlevel = \"info\"\n[http\nlisten = \"\"\n", is: ErrFile, want: []string{"k.toml:3: expected"}},
		{name: "unknown section", text: "[logs]\nlevel = 'info'\n", is: ErrKey,
			want: []string{"k.toml:", "[logs]", `"log"`}},
		{name: "wrong section", text: "[log]\nlisten = ''\n", is: ErrKey, want: []string{"k.toml:", `"http.listen"`}},
		{name: "top level", text: "sockt = 'a'\n", is: ErrKey, want: []string{`"socket"`}},
		{name: "ill-typed", text: "[engine]\n# c\nthreads_per_gpu = \"16\"\n", is: ErrValue,
			want: []string{"k.toml:", "engine.threads_per_gpu is text, want whole number"}},
		{name: "section as key", text: "log = 1\n", is: ErrValue, want: []string{"k.toml:", "want a table [log]"}},
		{name: "no UTF-8", flags: []Setting{{"root", "/mnt/\xff=1GiB"}}, is: ErrValue, want: []string{`\xff`, "UTF-8"}},
		{name: "bad choice", text: "[store]\ndurability = \"strickt\"\n", is: ErrValue,
			want: []string{"k.toml:", `did you mean "strict"`}},
		{name: "bad size", text: "[engine]\nslot_bytes = \"4MB?\"\n", is: ErrValue,
			want: []string{"k.toml:", "64KiB"}},
		{name: "small size", text: "[engine]\nslot_bytes = 65536\n", is: ErrValue, want: []string{"at least 1MiB"}},
		{name: "bad duration", text: "[session]\nlease_ttl = 30\n", is: ErrValue,
			want: []string{"k.toml:", `text such as "30s"`}},
		{name: "bad ratio", text: "[otlp]\nsample_ratio = 1.5\n", is: ErrValue, want: []string{"0 to 1"}},
		{name: "policy key", text: "[[policy]]\nmodul = 'a'\n", is: ErrKey, want: []string{"k.toml:", `"module"`}},
		{name: "policy table", text: "[policy]\nmodule = 'a'\n", is: ErrValue, want: []string{"[[policy]]"}},
		{name: "policy role", text: "[[policy]]\nmodule='a'\n\n[[policy]]\nmodule = 'b'\nroles = ['evct']\n",
			is: ErrValue, want: []string{"k.toml:", `"evict"`}},
		{name: "role twice",
			text: "[[policy]]\nmodule='a'\nroles=['evict']\n[[policy]]\nmodule = 'b'\nroles = ['evict']\n",
			is:   ErrValue, want: []string{"taken by a"}},
		{name: "grant", text: "[[policy]]\nmodule='a'\ngrants=['clok']\n", is: ErrValue, want: []string{`"clock"`}},
		{name: "policy key", text: "[[policy]]\nmodule='a'\npublic_key='minisign.pub'\n", is: ErrValue,
			want: []string{"k.toml:", "minisign"}},
		{name: "policy digest", text: "[[policy]]\nmodule='a'\nsha256='abc'\n", is: ErrValue,
			want: []string{"k.toml:", "SHA-256"}},
		{name: "policy fault", text: "[[policy]]\nmodule='a'\non_fault='stopp'\n", is: ErrValue,
			want: []string{`"stop"`}},
		{name: "policy memory", text: "[[policy]]\nmodule='a'\nmemory_pages=65537\n", is: ErrValue,
			want: []string{"at most 65536"}},
		{name: "policy fuel", text: "[[policy]]\nmodule='a'\nfuel=5\n", is: ErrValue,
			want: []string{"k.toml:", "{call"}},
		{name: "policy fuel key", text: "[[policy]]\nmodule='a'\nfuel={cal=5}\n", is: ErrKey, want: []string{`"call"`}},
		{name: "policy time", text: "[[policy]]\nmodule='a'\nfuel={time=\"soon\"}\n", is: ErrValue,
			want: []string{"policy.fuel.time", "3ms"}},
		{name: "policy time below nothing", text: "[[policy]]\nmodule='a'\nfuel={time=\"-1s\"}\n", is: ErrValue,
			want: []string{"0s or more"}},
		{name: "policy fuel below nothing", text: "[[policy]]\nmodule='a'\nfuel={call=-5}\n", is: ErrValue,
			want: []string{"0 or more"}},
		{name: "policy setting", text: "[[policy]]\nmodule='a'\n[policy.config]\nx = [1]\n", is: ErrValue,
			want: []string{"k.toml:", "policy.config.x"}},
		{name: "root key", text: "[[root]]\npath='a'\ncapactiy = 1\n", is: ErrKey,
			want: []string{"k.toml:", `"capacity"`}},
		{name: "unknown route", text: "[[root]]\npath = \"x\"\nroute = \"fast\"\n", is: ErrValue,
			want: []string{"root[0].route", "auto, direct, staged"}},
		{name: "direct without cuFile",
			text: "[gds]\nmax_device_memory = 0\n[[root]]\npath = \"x\"\nroute = \"direct\"\n", is: ErrValue,
			want: []string{"root[0].route", "gds.max_device_memory"}},
		{name: "root without path", text: "[[root]]\ncapacity = 1\n", is: ErrValue,
			want: []string{"k.toml:", "root[0].path"}},
		{name: "root twice", text: "[[root]]\npath='a'\n[[root]]\npath='./a'\n", is: ErrValue,
			want: []string{"k.toml:", "twice"}},
		{name: "min_free", text: "[[root]]\npath='a'\nmin_free = \"101%\"\n", is: ErrValue,
			want: []string{"k.toml:", "percentage"}},
		{name: "all free", text: "[[root]]\npath='a'\nmin_free = \"100%\"\n", is: ErrValue,
			want: []string{"root[0].min_free", "below 100%"}},
		{name: "daily_writes in percent", text: "[[root]]\npath='a'\ndaily_writes = \"5%\"\n", is: ErrValue,
			want: []string{"k.toml:", "want bytes"}},
		{name: "tenant key", text: "[[tenant]]\nid = 7\nqouta = \"5%\"\n", is: ErrKey,
			want: []string{"k.toml:", `"quota"`}},
		{name: "tenant id", text: "[[tenant]]\nid = \"9-3\"\nquota = \"5%\"\n", is: ErrValue,
			want: []string{"k.toml:", "9-3"}},
		{name: "tenant without quota", text: "[[tenant]]\nid = 7\n", is: ErrValue,
			want: []string{"k.toml:", "tenant[0].quota"}},
		{name: "tenant users", text: "[[tenant]]\nid = 7\nuids = [\"kv\"]\n", is: ErrValue,
			want: []string{"k.toml:", "tenant.uids", "kv"}},
		{name: "socket users", text: "socket_users = \"1001,kv\"\n", is: ErrValue, want: []string{"socket_users", "kv"}},
		{name: "tenant twice", text: "[[tenant]]\nid = \"*\"\nquota = 9\n[[tenant]]\nid = 3\nquota = 9\n",
			is: ErrValue, want: []string{"tenant[1].id", "before it"}},
		{name: "expiry without end", text: "[[expiry]]\nmodel = \"a/*\"\n", is: ErrValue,
			want: []string{"k.toml:", "expiry[0].ttl"}},
		{name: "expiry pattern", text: "[[expiry]]\nmodel = \"a[\"\nttl = \"1h\"\n", is: ErrValue,
			want: []string{"expiry[0].model"}},
		{name: "expiry key", text: "[[expiry]]\nmodle = \"a\"\nttl = \"1h\"\n", is: ErrKey,
			want: []string{"k.toml:", `"model"`}},
		{name: "compression of nothing", text: "[[compression]]\nmode = \"auto\"\n", is: ErrValue,
			want: []string{"k.toml:", "compression[0].namespaces"}},
		{name: "compression pattern", text: "[[compression]]\nnamespaces = [\"a\", \"dtype=\"]\nmode = \"auto\"\n", is: ErrValue,
			want: []string{"k.toml:", "dtype="}},
		{name: "compression mode", text: "[[compression]]\nnamespaces = [\"a\"]\nmode = \"hufman\"\n", is: ErrValue,
			want: []string{"k.toml:", "off, auto, huffman", `"huffman"`}},
		{name: "compression without a mode", text: "[[compression]]\nnamespaces = [\"a\"]\n", is: ErrValue,
			want: []string{"k.toml:", "compression[0].mode"}},
		{name: "compression key", text: "[[compression]]\nnamespace = [\"a\"]\n", is: ErrKey,
			want: []string{"k.toml:", `"namespaces"`}},
		{name: "no roots", text: "root = []\n", is: ErrValue, want: []string{"no roots"}},
		{name: "every interface, unnamed", text: "[http]\nlisten = ':80'\n", is: ErrValue,
			want: []string{"k.toml:", "0.0.0.0"}},
		{name: "profiles for all", text: "[http]\nlisten = '0.0.0.0:80'\nprofiles = true\n", is: ErrValue,
			want: []string{"k.toml:", "http.token_file"}},
		{name: "certificate without a key", text: "[http]\ntls_cert = 'a.pem'\n", is: ErrValue,
			want: []string{"k.toml:", "http.tls_key"}},
		{name: "pin", text: "[session.pins]\n\ndtyp = \"bf16\"\n", is: ErrValue,
			want: []string{"k.toml:", "session.pins.dtyp", `"dtype"`}},
		{name: "pin of a group", text: "[session.pins]\n\"group.x\" = \"1\"\n", is: ErrValue, want: []string{"k.toml:", "group.x"}},
		{name: "pin without a name", text: "[session.pins]\n\"extra.\" = \"1\"\n", is: ErrValue, want: []string{"k.toml:", "extra."}},
		{name: "pin to a list", text: "[session.pins]\nmodel = [\"a\"]\n", is: ErrValue,
			want: []string{"k.toml:", "session.pins.model is a list"}},
		{name: "pin to lines", text: "[session.pins]\nmodel = \"a\\nb\"\n", is: ErrValue, want: []string{"k.toml:", "line break"}},
		{name: "pins as text", text: "[session]\npins = \"dtype\"\n", is: ErrValue,
			want: []string{"k.toml:", "session.pins is text, want a table"}},
		{name: "settings as text", text: "[[policy]]\nmodule = 'a'\nconfig = \"x = 1\"\n", is: ErrValue,
			want: []string{"k.toml:", "policy.config is text, want a table"}},
		{name: "memory below nothing", env: []string{"KVHOST_STORE_MEMORY=-1"}, is: ErrValue},
		{name: "memory in words", env: []string{"KVHOST_STORE_MEMORY=automatic"}, is: ErrValue},
		{name: "little memory", env: []string{"KVHOST_STORE_MEMORY=1KiB"}, is: ErrValue},
		{name: "memory twice", env: []string{"KVHOST_ROOT=memory:=2GiB", "KVHOST_STORE_MEMORY=1GiB"}, is: ErrValue},
		{name: "a root without a capacity", flags: []Setting{{"root", "kv="}}, is: ErrValue, want: []string{"capacity of kv"}},
		{name: "a root of nothing", flags: []Setting{{"root", "kv=2"}}, is: ErrValue, want: []string{"at least 8KiB"}},
		{name: "a root in another unit", flags: []Setting{{"root", "kv=2TX"}}, is: ErrValue, want: []string{"capacity of kv"}},
		{name: "a part of no disk", flags: []Setting{{"root", "memory:=50%"}}, is: ErrValue, want: []string{"no file system"}},
		{name: "a part of nowhere", flags: []Setting{{"root", "/nowhere/at/all=5%"}}, is: os.ErrNotExist, want: []string{"no such file"}},
		{name: "all of them", text: "[log]\nlevel = 'x'\nformt = 'y'\n", is: ErrKey,
			want: []string{"log.level", "log.formt"}},
		{name: "environment", env: []string{"KVHOST_ENGINE_DIRECT_IO=maybe"}, is: ErrValue,
			want: []string{"KVHOST_ENGINE_DIRECT_IO", "true or false"}},
		{name: "flag", flags: []Setting{{"store.durability", "strct"}}, is: ErrValue,
			want: []string{"--store-durability", `"strict"`}},
		{name: "flag cross-check", flags: []Setting{{"socket", strings.Repeat("x", 200)}}, is: ErrValue,
			want: []string{"--socket", "at most 104"}},
		{name: "root flag", flags: []Setting{{"root", "/a=lots"}}, is: ErrValue,
			want: []string{"--root", "lots", "100G"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Load(Source{File: write(t, test.text), Env: test.env, Flags: test.flags})
			if !errors.Is(err, test.is) {
				t.Fatalf("error %v, want %v", err, test.is)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
	if _, err := Load(Source{File: "no/such/file.toml"}); !errors.Is(err, ErrFile) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

// A key that earlier hosts had is refused with what decides in its place, wherever it stands.
func TestKeysThatAreGone(t *testing.T) {
	for path, instead := range gone {
		section, name, within := strings.Cut(path, ".")
		head := "[" + section + "]\n"
		if !within {
			name = "x"
		} else if arrayNamed(section) != nil {
			head = "[[" + section + "]]\n"
		}
		_, err := Load(Source{File: write(t, head+name+" = 1\n")})
		if !errors.Is(err, ErrKey) || !strings.Contains(err.Error(), instead) {
			t.Errorf("%s in a file: got %v, want that it is gone, and %q", path, err, instead)
		}
		if arrayNamed(section) != nil || !within {
			continue
		}
		if byPath[path] != nil {
			t.Errorf("%s is gone, and there", path)
		}
		_, err = Load(Source{Env: []string{EnvName(path) + "=1"}})
		if !errors.Is(err, ErrKey) || !strings.Contains(err.Error(), instead) || !strings.Contains(err.Error(), EnvName(path)) {
			t.Errorf("%s in the environment: got %v, want that it is gone, and %q", path, err, instead)
		}
		if why := Gone("--" + FlagName(path)); !strings.Contains(why, instead) {
			t.Errorf("the flag of %s: got %q, want %q", path, why, instead)
		}
	}
}

// What has no meaning for a kind of root is refused by name.
func TestKeysOfOtherKinds(t *testing.T) {
	for _, c := range []struct{ path, line, key string }{
		{"s3://", "", "path"},
		{"s3://bucket/prefix", "route = 'direct'", "route"},
		{"s3://bucket/prefix", "require_mount = true", "require_mount"},
		{"s3://bucket/prefix", "min_free = 1", "min_free"},
		{"s3://bucket/prefix", "endpoint = 's3.example.org'", "endpoint"},
		{"s3://bucket/prefix", "ca_file = '/none'", "ca_file"},
		{"/a", "region = 'eu-central-1'", "region"},
		{"memory:A/b", "", "path"},
		{"memory:", "capacity = 4096", "capacity"},
		{"memory:", "shared = true", "shared"},
		{"memory:", "route = 'direct'", "route"},
		{"memory:", "require_mount = true", "require_mount"},
		{"memory:", "min_free = 1", "min_free"},
		{"memory:", "daily_writes = 1", "daily_writes"},
		{"memory:a", "[[root]]\npath = 'memory:a'", "path"},
	} {
		_, err := Load(Source{File: write(t, "[[root]]\npath = '"+c.path+"'\n"+c.line+"\n")})
		if err == nil || !strings.Contains(err.Error(), "root[0]."+c.key) && !strings.Contains(err.Error(), "root[1]."+c.key) {
			t.Errorf("a root with path %q and %q: got %v, want that it is %s", c.path, c.line, err, c.key)
		}
	}
	for _, path := range []string{"s3://bucket/prefix", "memory:", "./memory:"} {
		l, err := Load(Source{File: write(t, "[[root]]\npath = '"+path+"'\n")})
		if err != nil || (l.Config.Roots[0].Kind() == Directory) != (path == "./memory:") {
			t.Errorf("a root with path %q: got kind %v, %v", path, l, err)
		}
	}
}
