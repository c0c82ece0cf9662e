package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// exposure is the most that `systemd-analyze security` may say of a unit, times ten. A unit without any hardening has 96.
const exposure = "20"

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	testenv.OK(t, err)
	return string(text)
}

func write(t *testing.T, name, text string, mode os.FileMode) {
	t.Helper()
	testenv.OK(t, os.MkdirAll(filepath.Dir(name), 0o755))
	testenv.OK(t, os.WriteFile(name, []byte(text), mode))
}

// machine is the root of a machine with these units, kvhost, and the targets of systemd.
func machine(t *testing.T, units map[string]string) string {
	t.Helper()
	root := t.TempDir()
	at := filepath.Join(root, "usr/lib/systemd/system")
	targets, err := filepath.Glob("/usr/lib/systemd/system/*.target")
	if err != nil || len(targets) == 0 {
		t.Fatalf("no targets of systemd: %v", err)
	}
	for _, name := range targets {
		f, err := os.Open(name)
		if err != nil {
			continue // a link to a target that is not installed
		}
		text, err := io.ReadAll(f)
		f.Close()
		testenv.OK(t, err)
		write(t, filepath.Join(at, filepath.Base(name)), string(text), 0o644)
	}
	for name, text := range units {
		write(t, filepath.Join(at, name), text, 0o644)
	}
	for _, command := range []string{"usr/bin/kvhost", "bin/sh"} {
		write(t, filepath.Join(root, command), "#!/bin/sh\n", 0o755)
	}
	return root
}

func analyze(args ...string) (string, error) {
	out, err := exec.Command("systemd-analyze", args...).CombinedOutput()
	return string(out), err
}

// units are those that are shipped.
func units(t *testing.T) map[string]string {
	return map[string]string{
		"kvhost.service": read(t, "systemd/kvhost.service"), "kvhost@.service": read(t, "systemd/kvhost@.service"),
	}
}

// systemd takes the units without a word, and finds them hardened.
func TestUnits(t *testing.T) {
	testenv.Need(t, testenv.Systemd)
	root := machine(t, units(t))
	for _, name := range []string{"kvhost.service", "kvhost@second.service"} {
		if out, err := analyze("verify", "--root="+root, name); err != nil || strings.TrimSpace(out) != "" {
			t.Errorf("verify %s: %v\n%s", name, err, out)
		}
		if unit := units(t)["kvhost.service"]; regexp.MustCompile(`(?m)^RestrictSUIDSGID=`).MatchString(unit) {
			t.Error("RestrictSUIDSGID= forbids openat2, without which the host opens no root")
		}
		if out, err := analyze("security", "--offline=yes", "--no-pager", "--threshold="+exposure, "--root="+root,
			name); err != nil {
			t.Errorf("security %s: %v\n%s", name, err, out)
		}
	}
}

// The two units differ in names only, so that what is learned of one holds for the other.
func TestTemplateUnit(t *testing.T) {
	comment := regexp.MustCompile(`(?m)^#.*\n`)
	names := strings.NewReplacer("kvhost-%i", "kvhost", "kvhost %i", "kvhost", "/etc/kvhost/%i.toml", "/etc/kvhost/kvhost.toml")
	all := units(t)
	one, template := comment.ReplaceAllString(all["kvhost.service"], ""), comment.ReplaceAllString(all["kvhost@.service"], "")
	if names.Replace(template) != one || template == one {
		t.Errorf("kvhost@.service is\n%s\nkvhost.service is\n%s", template, one)
	}
}

// boot makes a machine of this one's files, with systemd as its first process, and runs /steps there. What it changes is gone
// afterwards, but for the file out.
const boot = `set -e
mount --make-rprivate / && mount -t tmpfs none "$1" && mkdir "$1/upper" "$1/work" "$1/root" && root="$1/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$root"
cp "$2" "$root/kvhost.deb" && cp "$3" "$root/steps"
mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev"
mount -t cgroup2 none "$root/sys/fs/cgroup" && mount -t tmpfs none "$root/run" && mount -t tmpfs none "$root/tmp"
touch "$root/out" && mount --bind "$4" "$root/out"
rm -rf "$root"/etc/systemd/system/*.wants
printf '[Service]\nType=oneshot\nExecStart=/bin/sh /steps\n' >"$root/etc/systemd/system/steps.service"
printf '[Unit]\nWants=steps.service systemd-journald.service\n' >"$root/etc/systemd/system/steps.target"
exec chroot "$root" env container=docker /lib/systemd/systemd --system --unit=steps.target --log-target=null --show-status=no`

// steps is a service's life, and says what came of each part of it. Where it differs from what is wanted, all is in the log.
const steps = `exec >/out 2>&1
as() { su kvhost -s /bin/sh -c "$*"; }
say() { echo "STEP $1: $2"; }
at=/etc/kvhost/kvhost.toml
dpkg --install /kvhost.deb; say install $?
as kvhost check --config $at; say check $?
systemctl start kvhost; say start $?
as kvhost status --config $at | grep -w ready; say "ready at once" $?
sed -i s/10GiB/9GiB/ $at
systemctl reload kvhost; say reload $?
echo nonsense=1 >>$at
systemctl reload kvhost; say "reload of nonsense" $?
systemctl is-active kvhost; say "active after it" $?
sed -i /nonsense/d $at
before=$(systemctl show -p MainPID --value kvhost)
dpkg --install /kvhost.deb; say upgrade $?
after=$(systemctl show -p MainPID --value kvhost)
[ "$after" != 0 ] && [ "$after" != "$before" ]; say "another process" $?
as kvhost status --config $at | grep -w ready; say "ready after it" $?
systemctl stop kvhost; say stop $?
as kvhost check --config $at; say "check after it" $?
printf '[http]\ntoken_file="/nope"\n' >>$at
as kvhost check --config $at; say "check without the token" $?
systemctl start kvhost; say "start without the token" $?
say "its exit code" $(systemctl show -p ExecMainStatus --value kvhost)
dpkg --remove kvhost; say remove $?
systemctl is-active kvhost; say "inactive" $?
dpkg --purge kvhost; say purge $?
[ ! -e /etc/kvhost ] && [ ! -e /var/cache/kvhost ] && [ -d /var/lib/kvhost/kv ]; say "roots only" $?
echo END
`

const stepsWanted = `install: 0, check: 0, start: 0, ready at once: 0, reload: 0, reload of nonsense: 1, active after it: 0, upgrade: 0, ` +
	`another process: 0, ready after it: 0, stop: 0, check after it: 0, check without the token: 12, start without the token: 1, ` +
	`its exit code: 12, remove: 0, inactive: 3, purge: 0, roots only: 0`

// The package's service lives under a systemd that runs: it is ready when it is started, a reload says what came of it, an upgrade
// restarts it, and check has the exit code of the start.
func TestLifeUnderSystemd(t *testing.T) {
	testenv.Need(t, testenv.Systemd, testenv.Mounts, testenv.Users)
	dir, at := releaseDir(t), t.TempDir()
	write(t, filepath.Join(at, "steps"), steps, 0o600)
	write(t, filepath.Join(at, "out"), "", 0o644)
	testenv.OK(t, os.Mkdir(filepath.Join(at, "machine"), 0o755))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var log bytes.Buffer
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", boot, "boot", filepath.Join(at, "machine"), filepath.Join(dir, file("amd64", ".deb")),
		filepath.Join(at, "steps"), filepath.Join(at, "out"))
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	testenv.OK(t, cmd.Start())
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	said := func() any { return read(t, filepath.Join(at, "out")) }
	testenv.Until(t, "the last step", func() bool {
		select {
		case <-ended:
			t.Fatalf("the machine ended: %s\n%s", log.String(), said())
		default:
		}
		return strings.HasSuffix(read(t, filepath.Join(at, "out")), "\nEND\n")
	}, said)
	stop()
	<-ended
	var got []string
	for line := range strings.Lines(read(t, filepath.Join(at, "out"))) {
		if step, ok := strings.CutPrefix(line, "STEP "); ok {
			got = append(got, strings.TrimSpace(step))
		}
	}
	if text := strings.Join(got, ", "); text != stepsWanted {
		t.Errorf("steps:\n%s\nwant\n%s\n%s", text, stepsWanted, read(t, filepath.Join(at, "out")))
	}
}
