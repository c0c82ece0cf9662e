package staging_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// everything is what a directory holds: names, modes, times of change, and bytes.
func everything(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	must(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		var content []byte
		if entry.Type().IsRegular() {
			content, err = os.ReadFile(path)
		}
		fmt.Fprintf(&b, "%s %v %v %q\n", path, info.Mode(), info.ModTime(), content)
		return err
	}))
	return b.String()
}

// fortress is a directory with links of every kind that lead out of it, beside what they lead to.
func fortress(t *testing.T) (dir, outside string) {
	top := testenv.Dir(t)
	dir, outside = filepath.Join(top, "root"), filepath.Join(top, "outside")
	must := func(err error) {
		t.Helper()
		must(t, err)
	}
	for _, d := range []string{dir + "/real", outside + "/sub"} {
		must(os.MkdirAll(d, 0o700))
	}
	for _, f := range []string{outside + "/file", outside + "/sub/file", dir + "/real/file", dir + "/plain"} {
		must(os.WriteFile(f, []byte("content"), 0o600))
	}
	for _, l := range [][2]string{
		{outside + "/file", "absolute"}, {"../outside/file", "relative"}, {outside, "directory"}, {"loop", "loop"},
		{"/proc/self/root" + outside + "/file", "magic"}, {"nothing", "dangling"}, {"real", "inside"}, {"..", "parent"},
		{outside + "/made", "unmade"},
	} {
		must(os.Symlink(l[0], filepath.Join(dir, l[1])))
	}
	must(os.Link(outside+"/file", dir+"/hard"))
	must(unix.Mkfifo(dir+"/fifo", 0o600))
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(err)
	defer unix.Close(fd)
	must(unix.Bind(fd, &unix.SockaddrUnix{Name: dir + "/socket"}))
	return dir, outside
}

// TestBelowLeadsNowhere tries every operation on every way out of a directory.
func TestBelowLeadsNowhere(t *testing.T) {
	dir, outside := fortress(t)
	before := everything(t, outside)
	fsys := staging.Below(dir)
	for _, n := range []string{
		"absolute", "relative", "directory", "loop", "magic", "dangling", "unmade", "parent", "fifo", "socket", "real",
	} {
		for flag, what := range map[int]string{
			os.O_RDONLY: "reading", os.O_RDWR: "writing", os.O_WRONLY: "writing only",
			os.O_RDWR | os.O_CREATE: "creating", os.O_WRONLY | os.O_TRUNC: "truncating",
		} {
			f, err := fsys.OpenFile(dir+"/"+n, flag, 0o600)
			if err == nil {
				f.Close()
				t.Errorf("%s opened for %s", n, what)
			} else if !errors.Is(err, staging.ErrNotRegular) {
				t.Errorf("%s opened for %s: %v", n, what, err)
			}
		}
		if _, err := fsys.Lock(dir + "/" + n); !errors.Is(err, staging.ErrNotRegular) {
			t.Errorf("lock %s: %v", n, err)
		}
	}
	for _, n := range []string{
		"directory/file", "directory/new", "parent/outside/file", "inside/file", "loop/file", "plain/file", "directory/sub/file",
	} {
		n = dir + "/" + n
		for _, flag := range []int{os.O_RDONLY, os.O_RDWR | os.O_CREATE, os.O_RDWR | os.O_CREATE | os.O_EXCL} {
			if _, err := fsys.OpenFile(n, flag, 0o600); !errors.Is(err, unix.ENOTDIR) {
				t.Errorf("open %s: %v", n, err)
			}
		}
		_, stat := fsys.Stat(n)
		_, list := fsys.ReadDir(n)
		_, lock := fsys.Lock(n)
		_, space := fsys.Statfs(n)
		for what, err := range map[string]error{
			"stat": stat, "list": list, "lock": lock, "statfs": space, "remove": fsys.Remove(n), "mkdir": fsys.Mkdir(n, 0o700),
			"make directories": fsys.MkdirAll(n, 0o700), "rename from": fsys.Rename(n, dir+"/new"),
			"rename to": fsys.Rename(dir+"/plain", n), "publish": fsys.RenameNoReplace(dir+"/plain", n),
			"link to": fsys.Link(dir+"/plain", n), "link from": fsys.Link(n, dir+"/new"), "sync": fsys.SyncDir(n),
			"sync all": fsys.SyncFS(n),
		} {
			if !errors.Is(err, unix.ENOTDIR) {
				t.Errorf("%s of %s: got %v, want %v", what, n, err, unix.ENOTDIR)
			}
		}
	}
	for _, n := range []string{outside + "/file", dir + "/../outside/file", dir + "x", "relative", "/"} {
		_, open := fsys.OpenFile(n, os.O_RDONLY, 0)
		_, stat := fsys.Stat(n)
		for what, err := range map[string]error{"open": open, "stat": stat, "remove": fsys.Remove(n)} {
			if !errors.Is(err, staging.ErrOutside) {
				t.Errorf("%s of %s: got %v, want %v", what, n, err, staging.ErrOutside)
			}
		}
	}
	for _, n := range []string{"directory", "inside", "parent"} {
		if _, err := fsys.ReadDir(dir + "/" + n); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("list %s: %v", n, err)
		}
		if info, err := fsys.Stat(dir + "/" + n); err != nil || info.Mode&fs.ModeSymlink == 0 {
			t.Errorf("stat %s: %+v, %v", n, info, err)
		}
		if err := fsys.MkdirAll(dir+"/"+n, 0o700); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("make %s: %v", n, err)
		}
	}
	// A file with two names can be read: what is in it is judged by its bytes.
	if _, err := fsys.OpenFile(dir+"/hard", os.O_WRONLY|os.O_TRUNC, 0); !errors.Is(err, staging.ErrLinked) {
		t.Errorf("write to a file of two names: %v", err)
	}
	if _, err := fsys.Lock(dir + "/hard"); !errors.Is(err, staging.ErrLinked) {
		t.Errorf("lock a file of two names: %v", err)
	}
	if f, err := fsys.OpenFile(dir+"/hard", os.O_RDONLY, 0); err != nil {
		t.Error(err)
	} else {
		f.Close()
	}
	// A rename over a link, and an unlinking of one, is of the link.
	testenv.NoError(t, fsys.Rename(dir+"/plain", dir+"/absolute"))
	for _, n := range []string{"relative", "directory", "fifo", "socket", "hard", "loop", "parent"} {
		testenv.NoError(t, fsys.Remove(dir+"/"+n))
	}
	if after := everything(t, outside); after != before {
		t.Errorf("outside changed:\n%s\nwas\n%s", after, before)
	}
}

// TestBelowFollowsItsDirectory replaces the directory itself, which is the operator's to do.
func TestBelowFollowsItsDirectory(t *testing.T) {
	top := t.TempDir()
	for _, d := range []string{"one", "two"} {
		must(t, os.Mkdir(filepath.Join(top, d), 0o700))
		must(t, os.WriteFile(filepath.Join(top, d, "name"), []byte(d), 0o600))
	}
	dir := filepath.Join(top, "dir")
	lead := func(to string) {
		t.Helper()
		_ = os.Remove(dir)
		must(t, os.Symlink(to, dir))
	}
	fsys := staging.Below(dir)
	is := func(want string) {
		t.Helper()
		f, err := fsys.OpenFile(dir+"/name", os.O_RDONLY, 0)
		must(t, err)
		defer f.Close()
		var got [3]byte
		if _, err := f.ReadAt(got[:], 0); err != nil || string(got[:]) != want {
			t.Fatalf("the file read is that in %s, error %v, want %s", got, err, want)
		}
	}
	lead("one")
	is("one")
	lead("two")
	is("one")
	if _, err := fsys.Stat(dir); err != nil {
		t.Fatal(err)
	}
	is("two")
	lock, err := fsys.Lock(dir)
	must(t, err)
	if _, err := staging.Below(dir).Lock(dir); !errors.Is(err, staging.ErrLocked) {
		t.Fatalf("locked twice: %v", err)
	}
	lead("one")
	if _, err := fsys.Stat(dir); err != nil {
		t.Fatal(err)
	}
	is("two") // where the lock is
	next, err := fsys.Lock(dir)
	must(t, err)
	is("one")
	must(t, errors.Join(lock.Close(), next.Close()))
	is("one")
	again, err := staging.Below(dir).Lock(dir)
	if err != nil {
		t.Fatal("the lock was not given back:", err)
	}
	again.Close()
}

// withoutOpenat2 is set for the process that must do without it.
const withoutOpenat2 = "KVHOST_TEST_WITHOUT_OPENAT2"

// A kernel that cannot open below a directory is named, and nothing is opened in another way.
func TestKernelWithoutOpenat2(t *testing.T) {
	if os.Getenv(withoutOpenat2) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKernelWithoutOpenat2$", "-test.v")
		cmd.Env = append(os.Environ(), withoutOpenat2+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("want the process without openat2 to pass, got %v\n%s", err, out)
		}
		return
	}
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	forbidOpenat2(t)
	_, err := staging.Below(dir).OpenFile(dir+"/file", os.O_RDONLY, 0)
	if !errors.Is(err, staging.ErrKernel) {
		t.Errorf("open without openat2: error %v, want %v", err, staging.ErrKernel)
	}
}

// forbidOpenat2 makes the call fail for the whole process as one that the kernel does not have.
func forbidOpenat2(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // both calls are of a thread
	defer runtime.UnlockOSThread()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_OPENAT2, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	must(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); errno != 0 {
		t.Fatal(errno)
	}
}
