package fusefs_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/testkit/fusefs"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

func mount(t *testing.T, rules string) *fusefs.Mount {
	t.Helper()
	testenv.Need(t, testenv.FUSE)
	m, err := fusefs.New(t.TempDir(), t.TempDir())
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, m.Unmount())
		mounts, err := os.ReadFile("/proc/mounts")
		if err != nil || strings.Contains(string(mounts), m.Dir) {
			t.Errorf("%s is still mounted: %v", m.Dir, err)
		}
	})
	testenv.OK(t, m.Set(rules))
	return m
}

// legal are rules of file systems that do less than others, and still what they must.
var legal = map[string]string{
	"all":             "",
	"short":           "read ** 33% seed 1: short\nwrite ** 50% seed 1: short",
	"interrupted":     "open,read,write,rename,publish,link,remove,mkdir,sync,allocate ** 33% seed 1: eintr",
	"no direct":       "direct **: einval", // a second mount on the same device number is not asked again
	"no allocate":     "allocate **: enotsup",
	"no rename flags": "publish **: einval",
}

// A file system that does less than others is one all the same: both ways of the host to use it find all operations.
func TestLegal(t *testing.T) {
	testenv.Slow(t)
	for name, rules := range legal {
		for way, open := range map[string]func(string) staging.FS{
			"os":    func(string) staging.FS { return staging.OS() },
			"below": func(dir string) staging.FS { return staging.Below(dir) },
		} {
			t.Run(name+"/"+way, func(t *testing.T) {
				m := mount(t, rules)
				faultfs.RunSuite(t, open(m.Dir), m.Dir)
				if n, err := m.Injected(); err != nil || n == 0 && rules != "" && name != "no direct" {
					t.Errorf("%d faults, %v", n, err)
				}
			})
		}
	}
}

// Faults reach the caller through the kernel, and hangs end when the rules do.
func TestFaults(t *testing.T) {
	m := mount(t, "")
	name := filepath.Join(m.Dir, "f")
	f, err := staging.OS().OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	testenv.OK(t, err)
	defer f.Close()
	want := bytes.Repeat([]byte("0123456789abcdef"), 512)
	if _, err := f.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	set := func(rules string) {
		t.Helper()
		testenv.OK(t, m.Set(rules))
	}
	got := make([]byte, len(want))
	set("read **: torn 4096")
	if _, err := f.ReadAt(got, 0); err != nil || bytes.Equal(got, want) || !bytes.Equal(got[:4096], want[:4096]) {
		t.Errorf("torn: %v, equal %t", err, bytes.Equal(got, want))
	}
	for rule, errno := range map[string]error{
		"write **: enospc": unix.ENOSPC, "write **: eio": unix.EIO, "write **: eio after": unix.EIO, "write **: estale": unix.ESTALE,
	} {
		set(rule)
		if _, err := f.WriteAt(want, 0); !errors.Is(err, errno) {
			t.Errorf("write with rule %s: got %v", rule, err)
		}
	}
	set("rename **: eio after")
	if err := os.Rename(name, name+"2"); !errors.Is(err, unix.EIO) {
		t.Errorf("rename: %v", err)
	}
	set("read **: hang")
	read := make(chan error)
	go func() { _, err := f.ReadAt(got, 0); read <- err }()
	for n := uint64(0); n == 0 && err == nil; n, err = m.Injected() {
	}
	select {
	case err := <-read:
		t.Errorf("it does not hang: %v", err)
	default:
	}
	set("")
	if err := <-read; err != nil || !bytes.Equal(got, want) {
		t.Errorf("after the hang: %v", err)
	}
	if _, err := os.Stat(name + "2"); err != nil { // the rename was made
		t.Error(err)
	}
	testenv.OK(t, m.Kill())
	if _, err := f.ReadAt(got, 0); err == nil {
		t.Error("read without a server")
	}
}
