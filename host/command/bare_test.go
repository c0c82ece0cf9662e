package command

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// Hosts in bare surroundings: a user without a home and without capabilities, a file system that cannot be written to,
// a disk that is not mounted. Each works, or says what mends it, and check foresees it.

// othersDir makes a directory with a short path that another user can enter: TMPDIR may be in a directory of this user's own.
func othersDir(t *testing.T) string {
	t.Helper()
	testenv.Need(t, testenv.Users)
	for _, above := range []string{testenv.ShortTemp(), "/tmp", "/var/tmp", "/dev/shm"} {
		open := true
		for at := above; open && at != "/"; at = filepath.Dir(at) {
			info, err := os.Stat(at)
			open = err == nil && info.Mode().Perm()&0o001 != 0
		}
		if !open {
			continue
		}
		if dir, err := os.MkdirTemp(above, "kv"); err == nil {
			t.Cleanup(func() { os.RemoveAll(dir) })
			return dir
		}
	}
	t.Skip("missing: a directory of temporary files that other users may enter")
	return ""
}

// asNobody makes a command nobody's, who has no home, in a directory that is his. HOME is as given; empty: not set.
func asNobody(t *testing.T, dir, home string, args ...string) *exec.Cmd {
	t.Helper()
	testenv.Need(t, testenv.Users)
	cmd := command(t, dir, args...)
	cmd.Path = filepath.Join(dir, "kvhost")
	if err := os.Link(binary, cmd.Path); err != nil && !os.IsExist(err) { // on another file system
		text, err := os.ReadFile(binary)
		testenv.OK(t, err)
		testenv.OK(t, os.WriteFile(cmd.Path, text, 0o755))
	}
	for _, err := range []error{os.Chmod(dir, 0o755), os.Chmod(cmd.Path, 0o755), os.Chown(dir, testenv.Nobody, testenv.Nobody)} {
		testenv.OK(t, err)
	}
	var env []string
	for _, v := range cmd.Env {
		if !strings.HasPrefix(v, "HOME=") && !strings.HasPrefix(v, "XDG_") {
			env = append(env, v)
		}
	}
	if cmd.Env = env; home != "" {
		cmd.Env = append(cmd.Env, "HOME="+home)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testenv.Nobody, Gid: testenv.Nobody}}
	return cmd
}

func get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	r, err := http.Get(url)
	testenv.OK(t, err)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	testenv.OK(t, err)
	return r.StatusCode, string(text)
}

// nobodys are ways of having no home, and what check says about the policies then.
var nobodys = map[string]struct {
	home string
	args []string
	says string
}{
	"no home":                     {"/nonexistent", nil, "policies are compiled at each start"},
	"no HOME":                     {"", nil, "neither XDG_CACHE_HOME nor HOME is set"},
	"a cache of his own":          {"/nonexistent", []string{"--policy-cache", "cache"}, ""},
	"no cache, as configured":     {"/nonexistent", []string{"--policy-cache", ""}, ""},
	"a home, but none of his own": {"/root", nil, "permission denied"},
}

// Nobody, with no capabilities, serves on another address than loopback, and compiles at each start where there is no
// cache. The log and check say so, with the setting that mends it.
func TestNobodyServes(t *testing.T) {
	const fix = "Set policy_cache to a directory that this user alone may write to"
	for name, c := range nobodys {
		t.Run(name, func(t *testing.T) {
			dir := othersDir(t)
			testenv.OK(t, os.WriteFile(filepath.Join(dir, "tiny.wasm"), wasmtest.Harmless(abi.RoleEvict), 0o644))
			args := append([]string{"--root", "kv=64MiB", "--policy", "tiny.wasm", "--http-listen", "0.0.0.0:0"}, c.args...)
			r := finish(t, asNobody(t, dir, c.home, append([]string{"check"}, args...)...))
			if foreseen := strings.Contains(r.stdout, fix); r.code != 0 || foreseen != (c.says != "") ||
				!strings.Contains(r.stdout, c.says) {
				t.Errorf("check: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
			}
			cmd, logged, stop := startCommand(t, asNobody(t, dir, c.home, args...))
			_, port, err := net.SplitHostPort(httpAddress(t, logged))
			testenv.OK(t, err)
			address := net.JoinHostPort(testenv.OutsideAddress(t), port)
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
			if err != nil || !strings.Contains(string(status), "CapEff:\t0000000000000000") {
				t.Errorf("it has capabilities: %v\n%s", err, status)
			}
			for _, path := range []string{"/livez", "/readyz"} {
				if code, text := get(t, "http://"+address+path); code != http.StatusOK {
					t.Errorf("get %s: %d %s", path, code, text)
				}
			}
			if code, text := get(t, "http://"+address+"/metrics"); code != http.StatusOK ||
				!strings.Contains(text, "kvhost_build_info") {
				t.Errorf("/metrics: %d %s", code, text)
			}
			if warned := strings.Contains(logged(), "Set policy_cache"); warned != (c.says != "") {
				t.Errorf("warned of the cache: %v\n%s", warned, logged())
			}
			if code := stop(syscall.SIGTERM); code != 0 {
				t.Errorf("exit code %d\n%s", code, logged())
			}
		})
	}
}

// What cannot work is refused with what mends it. check says it before, and the exit code lets a service manager try
// again, since a disk may be mounted late.
func TestRefusedRoots(t *testing.T) {
	dir := shortDir(t)
	write(t, dir, "mount.toml", "http.listen = \"\"\n[[root]]\npath = \"/kvhost-is-not-here\"\nrequire_mount = true\n")
	for _, c := range []struct {
		args []string
		fix  string // in check and in the host's error
	}{
		{[]string{"--root", filepath.Join(dir, "mnt", "kv") + "=1GiB"}, "mkdir -p " + filepath.Join(dir, "mnt")},
		{[]string{"--config", "mount.toml"}, "take require_mount away"},
	} {
		args := append(c.args, "--socket", "s", "--http-listen", "")
		if r := finish(t, command(t, dir, append([]string{"check"}, args...)...)); r.code != exitFailure ||
			!strings.Contains(r.stdout, c.fix) {
			t.Errorf("check %v: exit code %d\n%s%s", c.args, r.code, r.stdout, r.stderr)
		}
		if r := finish(t, command(t, dir, args...)); r.code != exitFailure || !strings.Contains(r.stderr, c.fix) {
			t.Errorf("%v: exit code %d\n%s", c.args, r.code, r.stderr)
		}
	}
	for _, path := range []string{filepath.Join(dir, "mnt"), "/kvhost-is-not-here"} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s was made: %v", path, err)
		}
	}
}

// Nobody is told which command makes a root his.
func TestRootOfAnother(t *testing.T) {
	dir := othersDir(t)
	args := []string{"--root", "/kvhost-nobody=1GiB", "--socket", "s", "--http-listen", ""}
	if r := finish(t, asNobody(t, dir, "", append([]string{"check"}, args...)...)); r.code != exitFailure ||
		!strings.Contains(r.stdout, "install -d -m 0700 -o 65534 /kvhost-nobody") {
		t.Errorf("check: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	if r := finish(t, asNobody(t, dir, "", args...)); r.code != exitFailure ||
		!strings.Contains(r.stderr, "install -d -m 0700 -o 65534 /kvhost-nobody") {
		t.Errorf("exit code %d\n%s", r.code, r.stderr)
	}
}

// On a read-only file system a host serves with its root, its socket and its cache on mounts, and else says what is
// missing. All of it is in a mount namespace of its own.
func TestReadOnlyFileSystem(t *testing.T) {
	testenv.Need(t, testenv.Mounts)
	dir := shortDir(t)
	testenv.OK(t, os.Mkdir(filepath.Join(dir, "state"), 0o755))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "tiny.wasm"), wasmtest.Harmless(abi.RoleEvict), 0o600))
	inside := func(args ...string) *exec.Cmd {
		const script = `mount --make-rprivate / && mount -t tmpfs kvhost-test state
grep -q ' /dev/shm ' /proc/mounts && mount -o remount,bind,ro /dev/shm
for at in $(awk '$2 ~ /^\/(tmp|var\/tmp)$/ {print $2}' /proc/mounts) /; do mount -o remount,bind,ro $at || exit 99; done
exec "$0" "$@"`
		cmd := command(t, dir)
		cmd.Path, cmd.Args = "/bin/sh", append([]string{"sh", "-c", script, binary}, args...)
		cmd.SysProcAttr = testenv.MountNamespace()
		return cmd
	}
	good := []string{"--root", "state/kv=64MiB", "--socket", "state/s", "--policy", "tiny.wasm", "--http-listen", ""}
	for _, c := range []struct {
		args []string
		code int
		fix  string // of check and of the host
	}{
		{[]string{"--root", "kv=64MiB", "--socket", "state/s", "--http-listen", ""}, exitFailure, "writable"},
		{[]string{"--root", "state/kv=64MiB", "--socket", "s", "--http-listen", ""}, exitFailure, "writable"},
		{append(good, "--policy-cache", ""), exitPolicy, "policy_cache"},
		{append(good, "--policy-cache", "cache"), exitPolicy, "policy_cache"},
	} {
		r := finish(t, inside(append([]string{"check"}, c.args...)...))
		if r.code != c.code || !strings.Contains(r.stdout, c.fix) {
			t.Errorf("check %v: exit code %d\n%s%s", c.args, r.code, r.stdout, r.stderr)
		}
		r = finish(t, inside(c.args...))
		if r.code != c.code || !strings.Contains(r.stderr, "read-only") || !strings.Contains(r.stderr, c.fix) {
			t.Errorf("%v: exit code %d\n%s", c.args, r.code, r.stderr)
		}
	}
	good = append(good, "--policy-cache", "state/cache")
	if r := finish(t, inside(append([]string{"check"}, good...)...)); r.code != 0 {
		t.Errorf("check: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	_, logged, stop := startCommand(t, inside(good...))
	if code := stop(syscall.SIGTERM); code != 0 || strings.Contains(logged(), `"WARN"`) {
		t.Errorf("exit code %d\n%s", code, logged())
	}
}
