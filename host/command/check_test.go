package command

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// check reports what it found, as text and as JSON, leaves nothing behind, and exits with 9 when something cannot work.
func TestCheck(t *testing.T) {
	dir := shortDir(t)
	r := finish(t, command(t, dir, "check", "--root", "kv=1MiB", "--socket", "s", "--http-listen", ""))
	if r.code != 0 || !strings.Contains(r.stdout, "staged") || !strings.Contains(r.stdout, "does not exist yet") {
		t.Errorf("check: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	r = finish(t, command(t, dir, "check", "--json", "--root", dir+"=1MiB", "--socket", "s", "--http-listen", "", "--gds-cuda", "off"))
	var report struct {
		Verdicts []struct{ Root, Route string }
		Facts    struct {
			Roots []struct{ Writable bool }
		}
	}
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 ||
		report.Verdicts[0].Route != "staged" || !report.Facts.Roots[0].Writable {
		t.Errorf("check --json: exit code %d, %v, want a staged route to a writable root\n%s%s", r.code, err, r.stdout, r.stderr)
	}
	file := write(t, dir, "file", "")
	r = finish(t, command(t, dir, "check", "--root", filepath.Join(file, "kv")+"=1MiB", "--socket", "missing/s", "--http-listen", ""))
	if r.code != exitFailure || strings.Count(r.stdout, "problem") != 2 || !strings.Contains(r.stderr, "would not start") {
		t.Errorf("check of an impossible root and socket: exit code %d, want two problems\n%s%s", r.code, r.stdout, r.stderr)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

// A configuration that forbids cuFile forbids it to check: the library is not loaded, and no device memory counts for
// slots. The memory of the copy threads always counts.
func TestCheckWantsWhatTheHostTries(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*config.Config)
		cufile bool
		direct bool
		memory int64 // MiB
	}{
		"by default": {func(*config.Config) {}, true, true, 1024 + 96},
		"no buffer":  {func(c *config.Config) { c.GDS.MaxDeviceMemory = 0 }, false, false, 96},
		"cuda off":   {func(c *config.Config) { c.GDS.CUDA = config.CUDAOff }, false, false, 0},
		"compression": {func(c *config.Config) { c.Store.Compression = config.CompressionAuto }, true, true,
			1024 + 4*2*96 + 1}, // windows twice as large, three times that beside them, and rows
		"staged": {func(c *config.Config) { c.Roots[0].Route = config.RouteStaged }, true, false, 96},
	} {
		cfg := config.Default().Clone()
		cfg.Roots = []config.Root{{Path: "kv", Capacity: 1 << 30}}
		c.change(cfg)
		if memory := deviceBytes(cfg); cfg.MayUseCuFile() != c.cufile || memory>>20 != c.memory || cfg.TriesDirect(cfg.Roots[0]) != c.direct {
			t.Errorf("%s: cuFile %t, a direct route %t, %d bytes of a GPU's memory, want %+v", name, cfg.MayUseCuFile(), cfg.TriesDirect(cfg.Roots[0]), memory, c)
		}
	}
}

// What a start refuses, check refuses, for the same reason and with the same exit code; what a start takes, check takes, or
// exits with 9 where the host serves and something configured cannot work.
func TestCheckSaysWhatAStartWould(t *testing.T) {
	dir := testenv.Dir(t)
	other := filepath.Join(dir, "other") // another host's
	testenv.OK(t, os.Mkdir(other, 0o700))
	_, log, _ := startHost(t, other, "--root", "kv=8MiB", "--socket", "s", "--http-listen", anyPort)
	port := httpAddress(t, log)
	taken, err := net.Listen("unix", filepath.Join(dir, "taken"))
	testenv.OK(t, err)
	defer taken.Close()
	for _, d := range []string{"nest/in/.kvhost", "loose", "is-root/.kvhost", "is-root/in", "real"} {
		testenv.OK(t, os.MkdirAll(filepath.Join(dir, d), 0o700))
	}
	testenv.OK(t, os.Chmod(filepath.Join(dir, "loose"), 0o777))
	testenv.OK(t, os.Symlink("real", filepath.Join(dir, "link")))
	write(t, dir, "file", "")
	write(t, dir, "short", "abcde")
	write(t, dir, "token", strings.Repeat("x", 20))
	write(t, dir, "not.wasm", "this is no module")
	write(t, dir, "headers", "no header\n")
	write(t, dir, "syntax.toml", "[log]\nlevel = \n")
	write(t, dir, "key.toml", "[log]\nlevle = 'info'\n")
	write(t, dir, "tenants.toml", "[[tenant]]\nid = '3'\nquota = '20%'\n[[tenant]]\nid = '3'\nquota = '10%'\n")
	write(t, dir, "role.toml", "[[policy]]\nmodule = 'lru.wasm'\nroles = ['place']\n")
	write(t, dir, "both.toml", "[[policy]]\nmodule = 'lru.wasm'\n[[policy]]\nmodule = 'fifo.wasm'\n")
	write(t, dir, "setting.toml", "[[policy]]\nmodule = 'prefix.wasm'\n[policy.config]\nno_such_setting = 1\n")
	write(t, dir, "digest.toml", "[[policy]]\nmodule = 'lru.wasm'\nsha256 = '"+strings.Repeat("0", 64)+"'\n")
	write(t, dir, "shadow.toml", "[[policy]]\nmodule = 'fanout.wasm'\nshadow = true\n")
	write(t, dir, "evict.toml", "[[root]]\npath = 'kv'\nevict = 'nothing'\n")
	write(t, dir, "mount.toml", "[[root]]\npath = '/kvhost-is-not-here'\nrequire_mount = true\n")
	write(t, dir, "alone.toml", "[[root]]\npath = '"+other+"/kv'\nshared = true\n")
	write(t, dir, "expiry.toml", "[[expiry]]\nmodel = '*'\nttl = 'soon'\n")
	write(t, dir, "compression.toml", "[[compression]]\nnamespaces = ['*']\nmode = 'zip'\n")
	write(t, dir, "pins.toml", "[session.pins]\nno_such_field = 'x'\n")
	write(t, dir, "quota.toml", "[[tenant]]\nid = '*'\nquota = '120%'\n")
	write(t, dir, "route.toml", "[[root]]\npath = 'memory:'\ncapacity = '64MiB'\nroute = 'direct'\n")
	write(t, dir, "order.toml", "[[root]]\npath = 'kv'\ncapacity = 'lots'\n[[root]]\npath = 'kv2'\n")
	const serves = 0 // and the process goes on
	cache, err := policytest.CacheDir()
	testenv.OK(t, err)
	base := []string{"--socket", "s", "--http-listen", "", "--policy-cache", cache}
	refused := 0
	for n, test := range []struct {
		args  string // what has an = before a blank is a variable
		check int    // exit code; a start that is refused has the same
		start int
	}{
		{"--config missing.toml", 12, 12}, {"--config syntax.toml", 12, 12}, {"--config key.toml", 12, 12},
		{"--config tenants.toml", 12, 12}, {"--config evict.toml", 12, 12}, {"--log-level loud", 12, 12},
		{"--root kv=1", 12, 12}, {"--max-memory 1MiB", 12, 12}, {"--no-such-flag", 12, 12}, {"--socket-users root", 12, 12},
		{"--http-listen :80", 12, 12}, {"--http-listen 127.0.0.1:0 --http-tls-cert file", 12, 12},
		{"--http-listen 127.0.0.1:0 --http-tls-cert nope --http-tls-key nope", 12, 12},
		{"--http-listen 127.0.0.1:0 --http-tls-cert file --http-tls-key file", 12, 12},
		{"--http-listen 127.0.0.1:0 --http-token-file nope", 12, 12}, {"--http-listen 127.0.0.1:0 --http-token-file short", 12, 12},
		{"--otlp-endpoint http://127.0.0.1:1 --otlp-headers-file nope", 12, 12},
		{"--otlp-endpoint http://127.0.0.1:1 --otlp-headers-file headers", 12, 12}, {"--otlp-endpoint grpc://x", 12, 12},
		{"--http-listen " + port, 4, 4}, {"--socket other/s", 4, 4}, {"--socket taken", 4, 4},
		{"--socket file", 11, 11}, {"--socket nope/s", 11, 11}, {"--socket file/s", 11, 11},
		{"--root other/kv=8MiB", 3, 3}, {"--config alone.toml", 3, 3},
		{"--root nope/kv=8MiB", 11, 11}, {"--root file=8MiB", 11, 11}, {"--root file/kv=8MiB", 11, 11}, {"--config mount.toml", 11, 11},
		{"--root /proc/kv=8MiB", 11, 11},
		{"--root nest=8MiB", 12, 12}, {"--root is-root/in=8MiB", 12, 12}, {"--root is-root/in/more=8MiB", 12, 12},
		{"--root real=8MiB --root link=8MiB", 12, 12}, {"--root new=8MiB --root new/in=8MiB", 12, 12}, {"--root kv=8MiB --root kv=8MiB", 12, 12},
		{"--policy nothing.wasm", 5, 5}, {"--policy not.wasm", 5, 5}, {"--policy-dir nope --policy lru.wasm", 5, 5},
		{"--policy-cache file --policy lru.wasm", 5, 5}, {"--config role.toml", 5, 5}, {"--config both.toml", 5, 5},
		{"--config setting.toml", 5, 5}, {"--config digest.toml", 5, 5}, {"--config shadow.toml", 5, 5},
		{"--engine-max-staging-memory 900TiB", 11, 11},
		{"KVHOST_GDS_USE_CUFILE=false", 12, 12}, {"KVHOST_LOG_LEVEL=loud", 12, 12}, {"KVHOST_ROOT=kv=1,5GiB", 12, 12},
		{"--session-lease-ttl 30", 12, 12}, {"--store-durability strckt", 12, 12}, {"--store-memory 1KiB", 12, 12},
		{"--root memroy:=1GiB", 12, 12}, {"--root ~/kv=1GiB", 12, 12}, {"--root kv=64MB1", 12, 12}, {"--root s3://B/p=1GiB", 12, 12},
		{"--peers-listen 0.0.0.0:1", 12, 12}, {"--peers-listen 127.0.0.1:0 --peers-cert file", 12, 12}, {"--peers-hosts nowhere", 12, 12},
		{"--peers-listen 127.0.0.1:0 --peers-cert nope --peers-key nope --peers-ca nope", 12, 12},
		{"--peers-listen 127.0.0.1:0 --peers-cert file --peers-key file --peers-ca file", 12, 12}, {"--peers-listen " + port, 4, 4},
		{"--config expiry.toml", 12, 12}, {"--config compression.toml", 12, 12}, {"--config pins.toml", 12, 12},
		{"--config quota.toml", 12, 12}, {"--config route.toml", 12, 12}, {"--config order.toml", 12, 12}, {"--root $HOME/kv=1GiB", 12, 12},
		{"--max-memory 64MiB --session-max-sessions 1024", 12, 12}, {"--engine-slot-bytes 5000000", 12, 12}, {"--move-workers 0", 12, 12},
		{"--gds-cuda maybe", 12, 12}, {"--otlp-sample-ratio 2", 12, 12}, {"--store-shared-lapse 1s", 12, 12}, {"--store-host-id A", 12, 12},
		{"--policy lru.wasm", 0, serves}, {"--http-listen 127.0.0.1:0 --http-token-file token", 0, serves}, {"--socket loose/s", 0, serves},
		{"--root file=8MiB --root kv=8MiB", 9, serves}, {"--root kv=900TiB", 9, serves},
	} {
		t.Run(test.args, func(t *testing.T) {
			before := names(t, dir)
			args := base
			if !strings.Contains(test.args, "--root") && !strings.Contains(test.args, "toml") {
				args = append(args, "--root", fmt.Sprintf("kv%d=8MiB", n))
			}
			args = append(args, strings.Fields(test.args)...)
			var env []string
			if strings.HasPrefix(test.args, "KVHOST_") {
				env, args = args[len(args)-1:], args[:len(args)-1]
			}
			if strings.HasPrefix(test.args, "KVHOST_ROOT") {
				args = base
			}
			with := func(cmd *exec.Cmd) *exec.Cmd {
				cmd.Env = append(cmd.Env, env...)
				return cmd
			}
			r := finish(t, with(command(t, dir, append([]string{"check"}, args...)...)))
			if r.code != test.check {
				t.Errorf("check: exit code %d, want %d\n%s%s", r.code, test.check, r.stdout, r.stderr)
			}
			if after := names(t, dir); after != before {
				t.Errorf("check left behind: %s, before %s", after, before)
			}
			if test.start == serves {
				if _, _, stop := startHost(t, dir, args...); stop(syscall.SIGTERM) != serves {
					t.Error("the host ended with another exit code than 0")
				}
				return
			}
			refused++
			s := finish(t, with(command(t, dir, args...)))
			if s.code != test.start {
				t.Errorf("start: exit code %d, want %d\n%s", s.code, test.start, s.stderr)
			}
			if why, said := reasons(s.stderr), reasons(r.stderr); len(why) != 1 || len(said) != 1 ||
				strings.TrimPrefix(said[0], "a host would not start: ") != why[0] {
				t.Errorf("the start refuses for %q, check for %q, want the same one sentence", why, said)
			}
		})
	}
	if refused < 75 {
		t.Errorf("%d configurations were refused, want 75", refused)
	}
}

// names are the files below a directory.
func names(t *testing.T, dir string) (list string) {
	t.Helper()
	testenv.OK(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if !strings.Contains(path, "/other/") {
			list += strings.TrimPrefix(path, dir) + " "
		}
		return err
	}))
	return list
}

// reasons are the lines of standard error that are not of the log, but for the one that leads to the help.
func reasons(stderr string) (list []string) {
	for line := range strings.Lines(stderr) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "kvhost: ")
		if line != "" && line[0] != '{' && !strings.HasPrefix(line, "see kvhost") {
			list = append(list, line)
		}
	}
	return list
}
