package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

// all are the packages with tests that use files, processes or sockets, but for random histories: these are the longest, and look at
// nothing of the machine. Cells with fewer packages have those that could notice.
func all(path string) bool { return path != "host/internal/testkit/storetest" && !in(within)(path) }

// within are packages that use nothing outside their process.
var within = []string{
	"host/kv", "host/internal/codec", "host/internal/payload", "host/internal/policy/meter", "host/internal/store/capacity",
	"host/internal/store/index", "host/internal/store/evictor", "host/internal/store/catalog", "host/internal/store/shared/...",
	"plugins/...", "abi/guest/...",
}

var sockets = in([]string{
	"host", "host/client", "host/command", "host/internal/observe", "host/internal/peers", "host/internal/replay", "host/internal/s3fs",
	"host/internal/server/...", "host/internal/spans", "host/internal/store", "host/internal/doctor", "host/internal/testkit/s3double",
	"gds/nixl",
})

var shared = in([]string{
	"host", "host/command", "host/internal/doctor", "host/internal/policy/sandbox", "host/internal/replay", "host/internal/server/...",
	"host/internal/store", "host/internal/transfer", "host/internal/testkit/...", "host/internal/memfs", "staging/...", "gds/...",
})

var dated = in([]string{
	"host/internal/config", "host/internal/budget", "host/internal/observe", "host/internal/peers", "host/internal/spans",
	"host/internal/s3fs", "host/internal/sim", "host/internal/trace", "host/internal/policy", "host/internal/server/...", "host/client",
})

func tests(p func(string) bool) func(string) bool {
	return func(path string) bool { return p(path) && path != "host/internal/testkit/storetest" }
}

func cells() []cell {
	const mounts, network = syscall.CLONE_NEWNS, syscall.CLONE_NEWNET
	return []cell{
		{name: "shm-large", holds: "/dev/shm empty, with 24 GiB", packages: tests(shared), needs: testenv.Mounts, flags: mounts, enter: sharedMemory("size=24g", false)},
		{name: "shm-small", holds: "/dev/shm of 64 MiB", packages: tests(shared), needs: testenv.Mounts, flags: mounts, enter: sharedMemory("size=64m", false)},
		{name: "shm-read-only", holds: "/dev/shm read-only", packages: tests(shared), needs: testenv.Mounts, flags: mounts, enter: sharedMemory("size=64m", true)},
		{name: "tmp-other", holds: "TMPDIR on another file system", packages: all, needs: testenv.Mounts, flags: mounts, enter: func(p *plan) error {
			return errors.Join(mount("tmpfs", p.Scratch, "size=16g"), p.tmp(p.Scratch))
		}},
		{name: "tmp-long", holds: "TMPDIR with a long path", packages: all, enter: func(p *plan) error {
			return p.tmp(filepath.Join(p.Scratch, strings.Repeat("a-long-name-of-a-directory/", 12)))
		}},
		{name: "tmp-blank", holds: "TMPDIR with a blank and a letter that is not ASCII", packages: all, enter: func(p *plan) error {
			return p.tmp(filepath.Join(p.Scratch, "größe 1"))
		}},
		{name: "no-home", holds: "HOME not set", packages: all, enter: func(p *plan) error {
			p.set("HOME", "")
			p.set("XDG_CACHE_HOME", "")
			p.set("XDG_CONFIG_HOME", "")
			return p.knowGo()
		}},
		{name: "user", holds: "an ordinary user", packages: all, needs: testenv.Users, flags: mounts, enter: becomeUser},
		{name: "no-ipv6", holds: "no IPv6, no other address than that of loopback", packages: sockets, needs: testenv.Mounts, flags: mounts | network, enter: func(*plan) error {
			for _, name := range []string{"all", "default"} {
				if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0); err != nil && !os.IsNotExist(err) {
					return err
				}
			}
			return loopback()
		}},
		{name: "one-core", holds: "one core", packages: all, enter: func(*plan) error {
			var have, one unix.CPUSet
			if err := unix.SchedGetaffinity(0, &have); err != nil {
				return err
			}
			for n := range 1024 {
				if have.IsSet(n) {
					one.Set(n)
					break
				}
			}
			return unix.SchedSetaffinity(0, &one)
		}},
		{name: "busy", holds: "nice 19 beside eight busy loops", packages: all, busy: 8, nice: 19, enter: func(*plan) error { return nil }},
		{name: "few-files", holds: "1024 open files", packages: all, enter: func(*plan) error {
			return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1024})
		}},
		{name: "umask", holds: "umask 077", packages: all, enter: func(*plan) error {
			unix.Umask(0o077)
			return nil
		}},
		{name: "turkish", holds: "LANG=tr_TR.UTF-8 in Kathmandu's time", packages: all, enter: func(p *plan) error {
			p.set("LANG", "tr_TR.UTF-8")
			p.set("LC_ALL", "tr_TR.UTF-8")
			p.set("TZ", "Asia/Kathmandu")
			return nil
		}},
		{name: "2031", holds: "the date in 2031, of tests that compare it with no file's", packages: dated, skew: time.Until(time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC)).Truncate(24 * time.Hour),
			enter: func(*plan) error { return nil }},
		{name: "caches", holds: "module and build caches read-only", packages: all, needs: testenv.Mounts, flags: mounts, warm: true, enter: func(p *plan) error {
			p.set("GODEBUG", "goindex=0") // else go stores an index of packages that had just been written when it last looked
			for _, dir := range []string{p.Go["GOCACHE"], p.Go["GOMODCACHE"]} {
				if err := readOnly(dir); err != nil {
					return err
				}
			}
			return nil
		}},
		{name: "offline", holds: "no network, with all that is downloaded", packages: all, needs: testenv.Mounts, flags: mounts | network, enter: func(*plan) error { return loopback() }},
	}
}

// set gives the tests a variable; empty: takes it away.
func (p *plan) set(name, value string) {
	var list []string
	for _, v := range p.Env {
		if !strings.HasPrefix(v, name+"=") {
			list = append(list, v)
		}
	}
	if p.Env = list; value != "" {
		p.Env = append(p.Env, name+"="+value)
	}
}

// tmp makes a directory the tests' TMPDIR.
func (p *plan) tmp(dir string) error {
	p.set("TMPDIR", filepath.Clean(dir))
	return os.MkdirAll(dir, 0o755)
}

// knowGo tells Go what it asks HOME for.
func (p *plan) knowGo() error {
	for _, name := range []string{"GOCACHE", "GOMODCACHE", "GOPATH"} {
		p.set(name, p.Go[name])
	}
	p.set("GOENV", "off")
	p.set("GOTELEMETRY", "off")
	return nil
}

func mount(kind, dir, options string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts from others: %w", err)
	}
	if err := unix.Mount("kvhost-test", dir, kind, 0, options); err != nil {
		return fmt.Errorf("mount %s (%s) at %s: %w", kind, options, dir, err)
	}
	return nil
}

func readOnly(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts from others: %w", err)
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", dir, err)
	}
	if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", dir, err)
	}
	return nil
}

func sharedMemory(options string, ro bool) func(*plan) error {
	return func(*plan) error {
		if err := mount("tmpfs", "/dev/shm", "mode=1777,"+options); err != nil || !ro {
			return err
		}
		if err := unix.Mount("", "/dev/shm", "", unix.MS_REMOUNT|unix.MS_RDONLY, options); err != nil {
			return fmt.Errorf("make /dev/shm read-only: %w", err)
		}
		return nil
	}
}

// loopback switches a network namespace's only interface on.
func loopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r)
}

// becomeUser makes the process a user's who has a home, can read the checkout and Go's files, and write to none of them: what is
// compiled goes to a layer above Go's cache.
func becomeUser(p *plan) error {
	at := "/run/kvhost-anywhere" // all directories above it may be entered
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := mount("tmpfs", at, "mode=755,size=16g"); err != nil {
		return err
	}
	place := func(name, from string) (string, error) {
		to := filepath.Join(at, name)
		if err := os.Mkdir(to, 0o755); err != nil {
			return "", err
		}
		return to, unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")
	}
	own := func(name string) string {
		dir := filepath.Join(at, name)
		if os.Mkdir(dir, 0o755) == nil {
			_ = os.Chown(dir, testenv.Nobody, testenv.Nobody) // else the tests say that they cannot write
		}
		return dir
	}
	checkout, err := place("checkout", p.Checkout)
	if err != nil {
		return err
	}
	root, err := place("go", p.Go["GOROOT"])
	if err != nil {
		return err
	}
	modules, err := place("modules", p.Go["GOMODCACHE"])
	if err != nil {
		return err
	}
	cache := own("cache")
	upper, work := own("upper"), own("work")
	layers := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", p.Go["GOCACHE"], upper, work)
	if err := unix.Mount("overlay", cache, "overlay", 0, layers); err != nil {
		return fmt.Errorf("a layer above %s: %w", p.Go["GOCACHE"], err)
	}
	parts, err := filepath.Glob(filepath.Join(cache, "??")) // that only the cache's owner may write to
	if err != nil {
		return err
	}
	for _, dir := range append(parts, cache) {
		if err := os.Chmod(dir, 0o777); err != nil {
			return err
		}
	}
	for path, name := range p.Binaries {
		rel, err := filepath.Rel(p.Checkout, name)
		if err != nil {
			return err
		}
		p.Binaries[path] = filepath.Join(checkout, rel)
	}
	p.Checkout = checkout
	p.Go = map[string]string{"GOCACHE": cache, "GOMODCACHE": modules, "GOPATH": own("path")}
	p.set("GOROOT", root)
	p.set("GIT_CONFIG_COUNT", "1") // git trusts no checkout of another user that it is not told of
	p.set("GIT_CONFIG_KEY_0", "safe.directory")
	p.set("GIT_CONFIG_VALUE_0", "*")
	p.set("GOFLAGS", "-buildvcs=false")
	p.set("HOME", own("home"))
	p.set("USER", "nobody")
	p.set("TMPDIR", own("tmp"))
	p.set("PATH", filepath.Join(root, "bin")+":"+os.Getenv("PATH"))
	if err := errors.Join(p.knowGo(), os.Chdir(checkout)); err != nil {
		return err
	}
	return errors.Join(unix.Setgroups(nil), unix.Setresgid(testenv.Nobody, testenv.Nobody, testenv.Nobody),
		unix.Setresuid(testenv.Nobody, testenv.Nobody, testenv.Nobody),
		unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)) // so that it may look at itself
}
