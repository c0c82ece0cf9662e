package main

import (
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"aead.dev/minisign"

	"github.com/kvhost/kvhost/abi/testenv"
)

// distVersion is that of the releases that tests make.
const distVersion = "1.2.3"

// olderVersion is that of the release before, which has the same files.
const olderVersion = "1.2.2"

// previous is the deb of the release before; empty: one of the same sources.
var previous = flag.String("previous", "", "a deb of the release before, which TestUpgrade replaces")

// dist makes the release.
func dist(out, archs string) error {
	with, err := overlay()
	if err != nil {
		return err
	}
	cmd := exec.Command("go", "run", "./examples/deploy", "-version", "v"+distVersion, "-out", out, "-arch", archs,
		"-overlay", with)
	cmd.Dir = testenv.Root()
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("dist: %w\n%s", err, out)
	}
	return nil
}

var released = sync.OnceValues(func() (string, error) {
	dir, archs := filepath.Join(shared, "release"), "amd64"
	if testenv.Packages.Have() { // else nothing looks at what is compiled for another architecture, from the first package on
		archs += ",arm64"
	}
	return dir, dist(dir, archs)
})

// releaseDir is the directory of a release.
func releaseDir(t *testing.T) string {
	t.Helper()
	testenv.Need(t, testenv.NFPM, testenv.Git)
	dir, err := released()
	testenv.OK(t, err)
	return dir
}

func file(arch, suffix string) string { return "kvhost_" + distVersion + "_linux_" + arch + suffix }

// installed is what both packages have.
var installed = []string{
	"/usr/bin/kvhost", "/etc/kvhost/kvhost.toml", "/usr/lib/systemd/system/kvhost.service",
	"/usr/lib/systemd/system/kvhost@.service", "/usr/share/doc/kvhost/copyright",
	"/usr/lib/tmpfiles.d/kvhost.conf", "/usr/share/bash-completion/completions/kvhost", "/usr/share/doc/kvhost/CHANGELOG.md",
	"/usr/share/man/man1/kvhost.1", "/usr/share/man/man1/kvhost-policy-swap.1", "/usr/share/man/man5/kvhost.toml.5",
	"/usr/share/kvhost/manual/index.html", "/usr/share/kvhost/manual/sections.js",
}

// A release has a tarball, packages and a bill of materials for each architecture, with the binary of that one in them.
func TestDist(t *testing.T) {
	testenv.Need(t, testenv.Packages)
	dir := releaseDir(t)
	sums := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	sums.Dir = dir
	out, err := sums.CombinedOutput()
	if err != nil || strings.Count(string(out), ": OK\n") != 11 {
		t.Errorf("verify the checksums: %v, want 11 files that are OK\n%s", err, out)
	}
	for arch, elf := range map[string]string{"amd64": "x86_64", "arm64": "aarch64"} {
		deb := filepath.Join(dir, file(arch, ".deb"))
		if got := must(t, "dpkg-deb", "--field", deb, "Architecture", "Version"); got !=
			"Architecture: "+arch+"\nVersion: "+distVersion+"\n" {
			t.Errorf("fields of %s: got %s", deb, got)
		}
		content := must(t, "dpkg-deb", "--contents", deb)
		rpm := filepath.Join(dir, file(arch, ".rpm"))
		if got := must(t, "rpm", "-qp", "--queryformat", "%{ARCH} %{VERSION}", rpm); got != elf+" "+distVersion {
			t.Errorf("architecture and version of %s: got %s", rpm, got)
		}
		must(t, "rpm", "-K", "--nosignature", rpm)
		listed := must(t, "rpm", "-qlp", rpm)
		for _, name := range installed {
			if !strings.Contains(content, " ."+name+"\n") || !strings.Contains(listed, name+"\n") {
				t.Errorf("%s: %s is missing in\n%s%s", arch, name, content, listed)
			}
		}
		if got := must(t, "rpm", "-qp", "--configfiles", rpm); got != "/etc/kvhost/kvhost.toml\n" {
			t.Errorf("%s: configuration: %s", rpm, got)
		}

		at := t.TempDir()
		must(t, "tar", "-xzf", filepath.Join(dir, file(arch, ".tar.gz")), "-C", at)
		binary := filepath.Join(at, file(arch, ""), "kvhost")
		info, err := buildinfo.ReadFile(binary)
		testenv.OK(t, err)
		var bill struct {
			BOMFormat, SpecVersion string
			Components             []struct{ Name, Version, Purl string }
		}
		if err := json.Unmarshal([]byte(read(t, filepath.Join(dir, file(arch, ".cdx.json")))), &bill); err != nil ||
			bill.BOMFormat != "CycloneDX" || len(bill.Components) != len(info.Deps)+1 {
			t.Fatalf("%v: %d components, the binary has %d modules", err, len(bill.Components), len(info.Deps))
		}
		for i, dep := range info.Deps {
			if c := bill.Components[i+1]; c.Purl != "pkg:golang/"+dep.Path+"@"+dep.Version {
				t.Errorf("%s: %s in the bill, %s in the binary", arch, c.Purl, dep.Path)
			}
		}
	}
}

// Two releases of one commit are the same bytes.
func TestDistIsReproducible(t *testing.T) {
	dir, again := releaseDir(t), filepath.Join(t.TempDir(), "again")
	testenv.OK(t, dist(again, "amd64"))
	list, err := os.ReadDir(again)
	if err != nil || len(list) != 7 {
		t.Fatalf("files of the distribution: got %v, %v, want 7", list, err)
	}
	for _, e := range list {
		if e.Name() == "SHA256SUMS" {
			continue // has the other architecture's, too
		}
		if read(t, filepath.Join(dir, e.Name())) != read(t, filepath.Join(again, e.Name())) {
			t.Errorf("%s differs", e.Name())
		}
	}
}

// The package makes a bare Debian serve: as its own user, and as nobody without a home; check and probes are well, and
// a reload takes what changed.
func TestInstall(t *testing.T) {
	dir, base := releaseDir(t), bareDebian(t)
	testenv.Need(t, testenv.Systemd)
	root := t.TempDir()
	testenv.OK(t, os.Chmod(root, 0o755))
	must(t, "tar", "--numeric-owner", "-xf", base, "-C", root)
	must(t, "cp", filepath.Join(dir, file("amd64", ".deb")), filepath.Join(root, "kvhost.deb"))
	must(t, "chroot", root, "dpkg", "--install", "/kvhost.deb")

	passwd := read(t, filepath.Join(root, "etc/passwd"))
	if !strings.Contains(passwd, "\nkvhost:") || !strings.Contains(passwd, ":/nonexistent:/usr/sbin/nologin\n") {
		t.Errorf("the user is not there:\n%s", passwd)
	}
	targets, _ := filepath.Glob("/usr/lib/systemd/system/*.target")
	for _, name := range targets {
		if text, err := os.ReadFile(name); err == nil {
			write(t, filepath.Join(root, "usr/lib/systemd/system", filepath.Base(name)), string(text), 0o644)
		}
	}
	if out, err := analyze("verify", "--root="+root, "kvhost.service"); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("verify: %v\n%s", err, out)
	}
	const at = "/etc/kvhost/kvhost.toml"
	// The documented first step, before the first start.
	if out, err := inside(root, "kvhost", "check", "--config", at).CombinedOutput(); err != nil || strings.Contains(string(out), "problem") {
		t.Errorf("check after the installation: %v\n%s", err, out)
	}
	if out := must(t, "chroot", root, "kvhost", "--version"); out != "kvhost "+distVersion+"\n" {
		t.Errorf("--version: %s", out)
	}

	// What systemd would make for the unit's user.
	address := outside(t)
	config := filepath.Join(root, "etc/kvhost/kvhost.toml")
	disk := strings.NewReplacer(`"10GiB"`, `"16MiB"`, "min_free", "# min_free") // this machine's may be nearly full
	text := disk.Replace(read(t, config))
	for _, user := range []string{"kvhost", "nobody"} {
		write(t, config, "http.listen = \""+address+"\"\n"+text, 0o644)
		for _, dir := range []string{"/run/kvhost", "/var/lib/kvhost", "/var/cache/kvhost"} {
			must(t, "chroot", root, "rm", "-rf", dir)
			must(t, "chroot", root, "install", "-d", "-m", "0700", "-o", user, dir)
		}
		out, err := inside(root, user, "check", "--config", at).CombinedOutput()
		if err != nil || strings.Count(string(out), "warning") != 1 || !strings.Contains(string(out), "not on loopback") {
			t.Errorf("check as %s: %v, want one warning, of the address\n%s", user, err, out)
		}
		cmd := inside(root, user, "--config", at)
		s := serve(t, cmd)
		uid := strings.TrimSpace(must(t, "chroot", root, "id", "-u", user))
		if n, err := strconv.Atoi(uid); err != nil {
			t.Error(err)
		} else {
			s.unprivileged(n)
		}
		s.probed(address)
		write(t, config, read(t, config)+"\n[[policy]]\nmodule = \"fifo.wasm\"\nshadow = true\n", 0o644)
		testenv.OK(t, syscall.Kill(s.pid, syscall.SIGHUP))
		s.await("configuration reloaded")
		s.stop()
	}
	must(t, "chroot", root, "dpkg", "--remove", "kvhost")
	if _, err := os.Stat(filepath.Join(root, "usr/bin/kvhost")); !os.IsNotExist(err) {
		t.Errorf("it is there after the package went: %v", err)
	}
	if _, err := os.Stat(config); err != nil {
		t.Errorf("the configuration went with the package: %v", err)
	}
	must(t, "chroot", root, "dpkg", "--purge", "kvhost")
	for at, stays := range map[string]bool{"etc/kvhost": false, "var/cache/kvhost": false, "var/lib/kvhost": true} {
		if _, err := os.Stat(filepath.Join(root, at)); os.IsNotExist(err) == stays {
			t.Errorf("/%s after a purge: %v, want it to stay: %v", at, err, stays)
		}
	}
}

// A newer package in the place of an older one, and the older one again, keep the configuration and every chunk.
func TestUpgrade(t *testing.T) {
	dir, base := releaseDir(t), bareDebian(t)
	newer, older := filepath.Join(dir, file("amd64", ".deb")), *previous
	if older == "" {
		older = withVersion(t, newer, olderVersion)
	}
	root := t.TempDir()
	testenv.OK(t, os.Chmod(root, 0o755))
	must(t, "tar", "--numeric-owner", "-xf", base, "-C", root)
	must(t, "cp", older, filepath.Join(root, "older.deb"))
	must(t, "cp", newer, filepath.Join(root, "newer.deb"))
	trace := ""
	for i := range 30 {
		trace += fmt.Sprintf(`{"timestamp":%d,"input_length":256,"output_length":1,"hash_ids":[%d]}`+"\n", i, i)
	}
	write(t, filepath.Join(root, "trace.jsonl"), trace, 0o644)
	const at = "/etc/kvhost/kvhost.toml"
	for i, deb := range []string{"/older.deb", "/newer.deb", "/older.deb"} {
		must(t, "chroot", root, "dpkg", "--install", deb)
		if i == 0 {
			config := filepath.Join(root, at)
			write(t, config, "http.listen = \""+outside(t)+"\"\n"+strings.NewReplacer(`"10GiB"`, `"16MiB"`, "min_free", "# min_free").Replace(read(t, config)), 0o644)
		}
		s := serve(t, inside(root, "kvhost", "--config", at))
		out, err := inside(root, "kvhost", "replay", "--socket", "/run/kvhost/kvhost.sock", "--trace", "/trace.jsonl", "--json").Output()
		var replayed struct {
			Hits       int
			Mismatches int `json:"mismatched_bytes"`
		}
		testenv.OK(t, errors.Join(err, json.Unmarshal(out, &replayed)))
		if want := min(i, 1) * 30; replayed.Hits != want || replayed.Mismatches != 0 {
			t.Errorf("after %d installations: %d of 30 chunks are there, want %d\n%s", i+1, replayed.Hits, want, out)
		}
		s.stop()
		if text := read(t, filepath.Join(root, at)); !strings.Contains(text, `"16MiB"`) {
			t.Errorf("the configuration is not the operator's any more:\n%s", text)
		}
	}
}

// withVersion is a deb with the files and scripts of another, and a version of its own.
func withVersion(t *testing.T, deb, version string) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "deb")
	must(t, "dpkg-deb", "--raw-extract", deb, at)
	control := filepath.Join(at, "DEBIAN", "control")
	write(t, control, strings.Replace(read(t, control), "\nVersion: "+distVersion+"\n", "\nVersion: "+version+"\n", 1), 0o644)
	must(t, "dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", at, at+".deb")
	return at + ".deb"
}

// inside is a command of kvhost's in a root, as a user without anything of this environment's.
func inside(root, user string, args ...string) *exec.Cmd {
	const script = `mount --make-rprivate / && mount -t proc proc "$0/proc" && user=$1 && shift && unset HOME KVHOST_REQUIRE_TOOLS &&
exec chroot --userspec="$user:nogroup" "$0" kvhost "$@"`
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, root, user}, args...)...)
	cmd.SysProcAttr = testenv.MountNamespace()
	return cmd
}

// Versions sort as their releases came, for dpkg and for pip.
func TestVersionsSort(t *testing.T) {
	testenv.Need(t, testenv.Packages, testenv.Python)
	before := ""
	for _, version := range []string{"0.1.0~git20261128.2e4370f", "0.1.0~git20261129.0e4370f", "v0.1.0-rc.1", "0.1.0-rc.2", "0.1.0-rc.10", "v0.1.0", "0.1.1", "0.2.0-rc.1"} {
		after := packageVersion(version)
		if before != "" {
			must(t, "dpkg", "--compare-versions", before, "lt", after)
			must(t, "python3", "-c", "import sys; from pip._vendor.packaging.version import Version as V; assert V(sys.argv[1]) < V(sys.argv[2]), sys.argv",
				wheelVersion(before), wheelVersion(after))
		}
		before = after
	}
}

// Notes have the changelog's section of the release, or of what is unreleased for a candidate, with links that lead from anywhere.
func TestNotes(t *testing.T) {
	t.Chdir(testenv.Root())
	r := &release{version: "0.1.0~rc.1", out: t.TempDir(), strict: true}
	testenv.OK(t, errors.Join(r.isRelease(), r.notes()))
	text := read(t, filepath.Join(r.out, "NOTES.md"))
	for _, part := range []string{"# kvhost 0.1.0-rc.1\n", "First public version", "## Upgrade and downgrade", "](https://github.com/kvhost/kvhost/blob/main/"} {
		if !strings.Contains(text, part) {
			t.Errorf("the notes have no %q:\n%s", part, text)
		}
	}
	for version, says := range map[string]string{"0.1.0~git20261128.2e4370f": "no release", "9.9.9": "pyproject.toml is of"} {
		r.version = version
		if err := r.isRelease(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("release of %s: %v, want %q", version, err, says)
		}
	}
	if r.version = "9.9.9"; r.notes() == nil {
		t.Error("notes of a release that the changelog does not have")
	}
}

// minisignKey is a key that a password opens in little time: minisign's own take three seconds of a processor each.
const (
	minisignKey = "untrusted comment: minisign encrypted secret key\n" +
		"RWRTY0IyZ5GRLHx81RNYMwaXtyCba3+yIWZnbrr0BVx0l8sBwtAAgAAAAAAAAAAAAAEAAAAAq8JtWzgw+iI/GOAZF6hoRws0D/msYz8hd0R/lmtSK+Po5i7hwBr4pbBE" +
		"dCfN292l2GmHAfaL12eUS6WLXcbDM9cz7vVXKEKPTg/SIBCgNXVZtStcBtXGHYd7I5XxrHnVMtmxu5THnCo="
	minisignPublic = "RWSTIaRntzYSEYf+cgV18e9LK/xWJFsoFoD4MRiGy+x7I9htYYv974U+"
)

// A release is signed by the key that is given, with a password or without.
func TestSigned(t *testing.T) {
	plainPublic, secret, err := minisign.GenerateKey(nil)
	testenv.OK(t, err)
	plain, err := secret.MarshalText()
	testenv.OK(t, err)
	var ofLocked minisign.PublicKey
	testenv.OK(t, ofLocked.UnmarshalText([]byte(minisignPublic)))
	r := &release{version: "1.2.3", out: t.TempDir(), key: filepath.Join(t.TempDir(), "key")}
	write(t, filepath.Join(r.out, "SHA256SUMS"), "sums\n", 0o644)
	t.Setenv("MINISIGN_PASSWORD", "password")
	for key, public := range map[string]minisign.PublicKey{string(plain): plainPublic, minisignKey: ofLocked} {
		write(t, r.key, key, 0o600)
		testenv.OK(t, r.sign())
		if !minisign.Verify(public, []byte("sums\n"), []byte(read(t, filepath.Join(r.out, "SHA256SUMS.minisig")))) {
			t.Error("the signature is not the key's")
		}
	}
	write(t, r.key, minisignKey, 0o600)
	if t.Setenv("MINISIGN_PASSWORD", "another"); r.sign() == nil {
		t.Error("a key was opened with another password")
	}
}

// Versions of packages sort: those between two releases before the next one.
func TestWheelVersions(t *testing.T) {
	for version, want := range map[string]string{
		"1.2.3":                        "1.2.3",
		"0.1.0~git20261123.2e4370f":    "0.1.0.dev20261123+2e4370f",
		"0.0.0~2e4370f":                "0.0.0.dev0+2e4370f",
		"0.1.0~git20261123.2e4.dirty":  "0.1.0.dev20261123+2e4.dirty",
		packageVersion("0.1.0~git2.a"): "0.1.0.dev2+a",
		packageVersion("v0.1.0-rc.1"):  "0.1.0rc1",
	} {
		if got := wheelVersion(version); got != want {
			t.Errorf("wheel's version of %s: got %s, want %s", version, got, want)
		}
	}
}

// A wheel gives an environment the program, the client and the engines' plugins; and a client of it starts a host.
func TestWheel(t *testing.T) {
	dir := releaseDir(t)
	testenv.Need(t, testenv.PythonPackages)
	env, run := t.TempDir(), t.TempDir()
	must(t, "python3", "-m", "venv", env)
	python := filepath.Join(env, "bin", "python")
	wheel := filepath.Join(dir, "kvhost-"+distVersion+"-py3-none-manylinux_2_17_x86_64.whl")
	must(t, python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
	if got := must(t, filepath.Join(env, "bin", "kvhost"), "version"); !strings.HasPrefix(got, "kvhost "+distVersion) {
		t.Errorf("installed program: got version %q, want %s", got, distVersion)
	}

	packages, err := filepath.Glob(filepath.Join(testenv.Root(), ".venv/lib/python3*/site-packages"))
	if err != nil || len(packages) != 1 {
		t.Fatalf("packages of the client's tests: got %v, %v, want one directory", packages, err)
	}
	site := strings.TrimSpace(must(t, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
	testenv.OK(t, os.WriteFile(filepath.Join(site, "needs.pth"), []byte(packages[0]+"\n"), 0o644))
	cmd := exec.Command(python, "-c", fmt.Sprintf(`
import kvhost, logging, os, pathlib, signal
from importlib import metadata
from kvhost.own import OwnHost, program
assert kvhost.__file__.startswith(%[1]q) and program().startswith(%[1]q), (kvhost.__file__, program())
assert kvhost.__version__ == %[2]q, kvhost.__version__
plugins = {e.value for e in metadata.distribution("kvhost").entry_points}
assert plugins == {"kvhost.vllm:register", "kvhost.sglang.plugin:register"}, plugins
logging.basicConfig()
host = OwnHost(memory="64MiB")
host.ensure()
group = kvhost.Group.uniform(0, blocks=1, layers=1, parts=1, page_bytes=65536)
space = kvhost.Namespace(model="m", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[group])
with kvhost.Session(host.socket, "e", space) as s:
    print("served by", s.version)
said = pathlib.Path(host.socket).with_suffix(".log").read_text()
os.kill(int(said.split('"pid":')[1].split(",")[0]), signal.SIGTERM)
`, env, distVersion))
	cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+run, "KVHOST_BIN=")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "served by "+distVersion+"\n") {
		t.Errorf("a client of the wheel's host: %v, want one that is served by %s\n%s", err, distVersion, out)
	}
}
