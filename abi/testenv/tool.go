//go:build linux

package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Tool is something that tests need and a machine may lack.
type Tool struct {
	Name     string // of the command, or what it is
	Tests    string // what is left out without it
	Packages string // Debian's, separated by blanks
	Other    string // another way to get it
	After    *Tool  // what it is installed with
	Optional bool   // never a failure: what a machine allows cannot be installed
	probe    func() bool
	build    []string // the command that builds it in the checkout, or leaves it where it is up to date

	once, building sync.Once
	have           bool
	failed         string // what the build said
}

// Have says whether the machine has it.
func (t *Tool) Have() bool {
	t.once.Do(func() { t.have = t.probe() })
	return t.have
}

// First is the tool itself, or the one to get before it.
func (t *Tool) First() *Tool {
	for t.After != nil && !t.After.Have() {
		t = t.After
	}
	return t
}

// Fix says how to get it.
func (t *Tool) Fix() string {
	var ways []string
	if t.Packages != "" {
		ways = append(ways, "apt-get install "+t.Packages)
	}
	if t.Other != "" {
		ways = append(ways, t.Other)
	}
	return strings.Join(ways, ", or ")
}

var (
	Make = &Tool{
		Name: "make", Tests: "the example policies, `kvhost policy new`", Packages: "make", probe: commands("make"),
	}
	Git   = &Tool{Name: "git", Tests: "the files at the top level", Packages: "git", probe: commands("git")}
	Clang = &Tool{
		Name: "clang and wasm-ld", Tests: "policies in C, the conformance checks' broken policies, the GPU's codec",
		Packages: "clang lld",
		probe:    commands("clang", "wasm-ld"),
	}
	Cargo = &Tool{
		Name: "cargo with wasm32-unknown-unknown", Tests: "policies in Rust", Packages: "cargo libstd-rust-dev-wasm32",
		Other: "rustup target add wasm32-unknown-unknown", probe: wasmTarget,
		build: []string{"rustup", "target", "add", "wasm32-unknown-unknown"},
	}
	CC = &Tool{
		Name: "a C compiler", Tests: "the race detector (the concurrent packages run without it), the GPU code",
		Packages: "gcc libc6-dev", probe: compilesC,
	}
	Python = &Tool{
		Name: "python3 with venv", Tests: "the Python client", Packages: "python3-venv", probe: python,
	}
	PythonPackages = &Tool{
		Name: "the packages of the Python client's tests", Tests: "the Python client",
		Other: "`make .venv/installed`, with a network", After: Python,
		probe: file(".venv", "installed"), build: []string{"make", ".venv/installed"},
	}
	Chromium = &Tool{
		Name: "chromium and chromedriver", Tests: "the page that a host serves", Packages: "chromium chromium-driver",
		probe: commands("chromium", "chromedriver"),
	}
	Promtool = &Tool{
		Name: "promtool", Tests: "the alert rules and the dashboard", Packages: "prometheus", probe: commands("promtool"),
	}
	Systemd = &Tool{
		Name: "systemd-analyze", Tests: "the systemd units", Packages: "systemd", probe: commands("systemd-analyze"),
	}
	Packages = &Tool{
		Name: "dpkg-deb and rpm", Tests: "the packages", Packages: "dpkg rpm", probe: commands("dpkg-deb", "rpm"),
	}
	NFPM = &Tool{
		Name: "nfpm", Tests: "the packages", Other: "`make .build/bin/nfpm`, with a network", After: Make,
		probe: file(".build", "bin", "nfpm"), build: []string{"make", ".build/bin/nfpm"},
	}
	Kubernetes = &Tool{
		Name: "the check of Kubernetes' manifests", Tests: "the Helm chart and the plain manifests",
		Other: "`make .build/bin/check-kubernetes`, with a network", After: Make,
		probe: file(".build", "bin", "check-kubernetes"), build: []string{"make", ".build/bin/check-kubernetes"},
	}
	VersityGW = &Tool{
		Name: "versitygw", Tests: "roots in buckets of a server that is no double",
		Other: "`make .build/bin/versitygw`, with a network and minutes of a processor", Optional: true, After: Make,
		probe: file(".build", "bin", "versitygw"),
	}
	NIXL = &Tool{
		Name: "NVIDIA's wheel of NIXL", Tests: "bytes of peers by NIXL", Other: "`make .build/nixl/installed`, with a network", After: Python,
		probe: file(".build", "nixl", "installed"), build: []string{"make", ".build/nixl/installed"},
	}
	OthersMemory = &Tool{
		Name: "the right to read the memory of other processes", Tests: "bytes of peers by NIXL",
		Other: "run as root with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0", Optional: true, probe: readsOthersMemory,
	}
	Mmdebstrap = &Tool{
		Name: "mmdebstrap", Tests: "an installation on a bare Debian", Packages: "mmdebstrap", probe: commands("mmdebstrap"),
	}
	Debian = &Tool{
		Name: "an archive of a bare Debian", Tests: "an installation on a bare Debian", Other: "`make .build/base/bare.tar`, with a network",
		After: Mmdebstrap, probe: file(".build", "base", "bare.tar"), build: []string{"make", ".build/base/bare.tar"},
	}
	Buildah = &Tool{
		Name: "buildah", Tests: "the container image", Packages: "buildah", probe: commands("buildah"),
	}
	Mounts = &Tool{
		Name: "the right to mount", Tests: "a full disk, a root that is unmounted",
		Other: "run as root with CAP_SYS_ADMIN, or allow unprivileged user namespaces", Optional: true, probe: mounts,
	}
	Users = &Tool{
		Name: "the right to become another user", Tests: "hosts of a user without a home and without capabilities",
		Other: "run as root with CAP_SETUID and CAP_SETGID", Optional: true, probe: becomesNobody,
	}
	FUSE = &Tool{
		Name: "/dev/fuse", Tests: "roots on a file system that misbehaves below the kernel",
		Other: "run as root with CAP_SYS_ADMIN, and give the container /dev/fuse", Optional: true, probe: mayUseFUSE,
	}
	SharedMemory = &Tool{
		Name: "a /dev/shm that this user may write to", Tests: "memory that processes share by its name", Other: "mount a tmpfs there",
		Optional: true, probe: func() bool { return unix.Access("/dev/shm", unix.W_OK) == nil },
	}
	DirectIO = &Tool{
		Name: "direct I/O", Tests: "what GPUDirect Storage needs of a file", Other: "set TMPDIR to a directory on a disk",
		Optional: true, probe: takesDirectIO,
	}
	Devices = &Tool{
		Name: "the right to make devices", Tests: "devices in the place of a store's files", Other: "run as root with CAP_MKNOD",
		Optional: true, probe: makesDevices,
	}
	UserFaults = &Tool{
		Name: "userfaultfd", Tests: "that a host allocates no page of a client",
		Other: "a kernel with CONFIG_USERFAULTFD, and no filter of that system call", Optional: true, probe: userFaults,
	}
	MemoryCgroup = &Tool{
		Name: "memory cgroups", Tests: "whose memory a client's pages are",
		Other: "run as root with a writable /sys/fs/cgroup", Optional: true, probe: func() bool { return MemoryCgroups() != "" },
	}
)

// Tools are all of them.
var Tools = []*Tool{Make, Git, CC, Clang, Cargo, Python, PythonPackages, Chromium, Promtool, Systemd,
	Packages, NFPM, Kubernetes, VersityGW, NIXL, OthersMemory, Mmdebstrap, Debian, Buildah, Mounts, Users, FUSE, SharedMemory,
	DirectIO, Devices, UserFaults, MemoryCgroup}

func commands(names ...string) func() bool {
	return func() bool {
		for _, name := range names {
			if _, err := exec.LookPath(name); err != nil {
				return false
			}
		}
		return true
	}
}

// Root is the checkout that the working directory is in; empty when it is in none.
var Root = sync.OnceValue(func() string {
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	path := strings.TrimSpace(string(mod))
	if err != nil || filepath.Base(path) != "go.mod" {
		return ""
	}
	return filepath.Dir(path)
})

func file(parts ...string) func() bool {
	return func() bool {
		_, err := os.Stat(filepath.Join(append([]string{Root()}, parts...)...))
		return Root() != "" && err == nil
	}
}

func wasmTarget() bool {
	if !commands("cargo", "rustc")() {
		return false
	}
	root, err := exec.Command("rustc", "--print", "sysroot").Output()
	if err != nil {
		return false
	}
	_, err = os.Stat(filepath.Join(strings.TrimSpace(string(root)), "lib", "rustlib", "wasm32-unknown-unknown", "lib"))
	return err == nil
}

// compilesC needs the headers, too: a compiler alone does not link what cgo does.
func compilesC() bool {
	name := "gcc"
	if cc, err := exec.Command("go", "env", "CC").Output(); err == nil && len(strings.Fields(string(cc))) > 0 {
		name = strings.Fields(string(cc))[0]
	}
	if !commands("cc")() {
		return false
	}
	cmd := exec.Command(name, "-x", "c", "-", "-pthread", "-o", os.DevNull)
	cmd.Stdin = strings.NewReader("#include <stdlib.h>\n#include <pthread.h>\nint main(void) { return 0; }\n")
	return cmd.Run() == nil
}

func python() bool { return exec.Command("python3", "-c", "import ensurepip, venv").Run() == nil }

// MountNamespace is how a command gets mounts of its own: as this user where that may mount, else in a user namespace.
func MountNamespace() *syscall.SysProcAttr {
	if os.Geteuid() == 0 {
		return &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	}
	return &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
	}
}

// MemoryCgroups is the directory in which this process can make memory cgroups; empty where it cannot.
var MemoryCgroups = sync.OnceValue(func() string {
	for _, dir := range []string{"/sys/fs/cgroup/memory", "/sys/fs/cgroup"} { // version 1, version 2
		probe, err := os.MkdirTemp(dir, "kvhost-probe-")
		if err != nil {
			continue
		}
		_, err = os.Stat(filepath.Join(probe, "memory.stat"))
		if os.Remove(probe) == nil && err == nil {
			return dir
		}
	}
	return ""
})

func userFaults() bool {
	const userModeOnly = 1
	fd, _, errno := syscall.Syscall(sysUserfaultfd[runtime.GOARCH], userModeOnly, 0, 0)
	return errno == 0 && syscall.Close(int(fd)) == nil
}

// sysUserfaultfd is the number of the system call.
var sysUserfaultfd = map[string]uintptr{"amd64": 323, "arm64": 282}

const Nobody = 65534 // the user and the group without files

func becomesNobody() bool {
	cmd := exec.Command("true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: Nobody, Gid: Nobody}}
	return cmd.Run() == nil
}

func takesDirectIO() bool {
	dir, err := os.MkdirTemp("", "kvhost-direct-")
	if err != nil {
		return false
	}
	defer os.RemoveAll(dir)
	f, err := os.OpenFile(filepath.Join(dir, "file"), os.O_RDWR|os.O_CREATE|syscall.O_DIRECT, 0o600)
	return err == nil && f.Close() == nil
}

func makesDevices() bool {
	dir, err := os.MkdirTemp("", "kvhost-device-")
	if err != nil {
		return false
	}
	defer os.RemoveAll(dir)
	const null = 1<<8 | 3
	return syscall.Mknod(filepath.Join(dir, "null"), syscall.S_IFCHR|0o600, null) == nil
}

func mayUseFUSE() bool {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	return f.Close() == nil && os.Geteuid() == 0 && Mounts.Have()
}

// readsOthersMemory looks where UCX does, and whether a filter of system calls keeps the process from it.
func readsOthersMemory() bool {
	const sysPtrace = 1 << 19
	scope, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if err == nil && strings.TrimSpace(string(scope)) != "0" {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if unix.Capget(&header, &data[0]) != nil || data[0].Effective&sysPtrace == 0 {
			return false
		}
	}
	var from, to [1]byte
	local := []unix.Iovec{{Base: &to[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&from[0])), Len: 1}}
	n, err := unix.ProcessVMReadv(os.Getpid(), local, remote, 0)
	return n == 1 && err == nil
}

func mounts() bool {
	dir, err := os.MkdirTemp("", "kvhost-mount-")
	if err != nil {
		return false
	}
	defer os.Remove(dir)
	cmd := exec.Command("sh", "-c", `mount --make-rprivate / && mount -t tmpfs -o size=64k kvhost-test "$0"`, dir)
	cmd.SysProcAttr = MountNamespace()
	return cmd.Run() == nil
}
