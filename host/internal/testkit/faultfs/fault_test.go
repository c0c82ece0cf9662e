package faultfs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"math/bits"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

func TestFaultEveryOperation(t *testing.T) {
	dir := t.TempDir()
	f := New(staging.OS())
	name := filepath.Join(dir, "a")
	file, err := f.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	defer file.Close()
	ops := map[string]func() error{
		"open":     func() error { _, err := f.OpenFile(name, os.O_RDONLY, 0); return err },
		"direct":   func() error { _, err := f.OpenFile(name, os.O_RDONLY|unix.O_DIRECT, 0); return err },
		"read":     func() error { _, err := file.ReadAt(make([]byte, 1), 0); return err },
		"write":    func() error { _, err := file.WriteAt(make([]byte, 1), 0); return err },
		"sync":     file.Datasync,
		"allocate": func() error { return file.Allocate(4096) },
		"close": func() error {
			g, err := f.OpenFile(name, os.O_RDONLY, 0)
			if err != nil {
				return nil
			}
			return g.Close()
		},
		"rename":  func() error { return f.Rename(name, name+"2") },
		"publish": func() error { return f.RenameNoReplace(name, name+"2") },
		"link":    func() error { return f.Link(name, name+"2") },
		"remove":  func() error { return f.Remove(name) },
		"mkdir":   func() error { return errors.Join(f.Mkdir(name+"d", 0o700), f.MkdirAll(name+"e/f", 0o700)) },
		"readdir": func() error { _, err := f.ReadDir(dir); return err },
		"stat": func() error {
			if _, err := file.Stat(); err == nil {
				return nil
			}
			_, err := f.Stat(name)
			return err
		},
		"syncdir": func() error { return f.SyncDir(dir) },
		"syncfs":  func() error { return f.SyncFS(dir) },
		"statfs":  func() error { _, err := f.Statfs(dir); return err },
		"lock":    func() error { _, err := f.Lock(name + "l"); return err },
	}
	if all := bits.OnesCount32(uint32(staging.OpAny)); len(ops) != all {
		t.Fatalf("%d of %d operations are tested", len(ops), all)
	}
	for op, do := range ops {
		rules := MustRules(op + " **: estale")
		rules[0].Path = dir + "**" // which may have a blank
		f.Set(rules...)
		err := do()
		if !errors.Is(err, unix.ESTALE) || !errors.Is(err, ErrInjected) {
			t.Errorf("%s under a rule: error %v, want an injected %v", op, err, unix.ESTALE)
		}
		if f.Injected() == 0 {
			t.Errorf("%s: the fault is not counted", op)
		}
	}
	list, err := os.ReadDir(dir)
	if err != nil || len(list) != 1 || list[0].Name() != "a" {
		t.Fatalf("something happened although it failed: %v %v", list, err)
	}
}

func TestFaultAfter(t *testing.T) {
	dir := t.TempDir()
	a, b, c := filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "c")
	put(t, a, "A")
	f := New(staging.OS(), MustRules("publish **/b: eio after\nopen **/c: emfile after\nlock **: eio after\nwrite **: enospc after")...)
	err := f.RenameNoReplace(a, b)
	var le *os.LinkError
	if !errors.Is(err, unix.EIO) || !errors.As(err, &le) || le.New != b {
		t.Fatal(err)
	}
	if get(t, b) != "A" {
		t.Fatal("it did not happen")
	}
	if err := f.RenameNoReplace(a, b); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("the real error is the one to tell: %v", err)
	}
	if file, err := f.OpenFile(c, os.O_RDWR|os.O_CREATE, 0o600); !errors.Is(err, unix.EMFILE) || file != nil {
		t.Fatalf("open that fails afterwards: file %v, error %v, want %v", file, err, unix.EMFILE)
	}
	if get(t, c) != "" {
		t.Fatal("not made")
	}
	for range 2 {
		if _, err := f.Lock(a); !errors.Is(err, unix.EIO) || errors.Is(err, staging.ErrLocked) {
			t.Fatalf("a lock that was reported as failed stays held: %v", err)
		}
	}
	file, err := f.OpenFile(b, os.O_RDWR, 0)
	must(t, err)
	defer file.Close()
	if n, err := file.WriteAt([]byte("B"), 0); n != 0 || !errors.Is(err, unix.ENOSPC) || get(t, b) != "B" {
		t.Fatalf("%d %v, content %q", n, err, get(t, b))
	}
}

// TestFaultTransfers cuts reads and writes short and tears them, buffered and direct.
func TestFaultTransfers(t *testing.T) {
	const k = staging.Align
	for _, c := range []struct {
		rule     string
		direct   bool
		write    bool
		len      int
		n        int
		err      error
		real     int   // bytes of the transfer that are real
		fileSize int64 // after a write
	}{
		{rule: "short", len: 1000, n: 500, err: io.EOF, real: 500},
		{rule: "short 7", len: 1000, n: 7, err: io.EOF, real: 7},
		{rule: "short 0", len: 1000, n: 0, err: io.EOF},
		{rule: "short 5000", len: 1000, n: 1000, real: 1000},
		{rule: "short 5000", direct: true, len: 4 * k, n: k, err: io.EOF, real: k},
		{rule: "torn 7", len: 1000, n: 1000, real: 7},
		{rule: "torn", direct: true, len: 2 * k, n: 2 * k, real: k},
		{rule: "torn 4100", direct: true, len: 2 * k, n: 2 * k, real: 4100},
		{rule: "short", write: true, len: 1000, n: 500, err: io.ErrShortWrite, real: 500, fileSize: 500},
		{rule: "short 5000", write: true, direct: true, len: 4 * k, n: k, err: io.ErrShortWrite, real: k, fileSize: k},
		{rule: "torn 7", write: true, len: 1000, n: 1000, real: 7, fileSize: 7},
		{rule: "torn 4100", write: true, direct: true, len: 4 * k, n: 4 * k, real: k, fileSize: k},
		{rule: "torn 0", write: true, direct: true, len: k, n: k},
	} {
		t.Run(c.rule, func(t *testing.T) {
			name := filepath.Join(t.TempDir(), "a")
			full := bytes.Repeat([]byte{0xa5}, 4*k)
			f := New(staging.OS())
			if !c.write {
				put(t, name, string(full))
			}
			open := f.OpenFile
			if c.direct {
				open = func(name string, flag int, perm fs.FileMode) (staging.File, error) {
					return staging.OpenDirect(f, name, flag, perm)
				}
			}
			file, err := open(name, os.O_RDWR|os.O_CREATE, 0o600)
			must(t, err)
			defer file.Close()
			if file.Direct() != c.direct {
				t.Log("no direct I/O in the temporary directory")
				return
			}
			f.Set(MustRules("read,write ** 1st: " + c.rule)...)
			mem := slot(t, 4*k)[:c.len]
			if c.write {
				copy(mem, full)
				n, err := file.WriteAt(mem, 0)
				if n != c.n || !errors.Is(err, c.err) {
					t.Fatalf("wrote %d, %v", n, err)
				}
				got := []byte(get(t, name))
				if int64(len(got)) != c.fileSize || !bytes.Equal(got[:c.real], full[:c.real]) {
					t.Fatalf("the file has %d bytes", len(got))
				}
				if !bytes.Equal(mem, full[:c.len]) {
					t.Fatal("the caller's bytes were changed")
				}
				if n, err := file.WriteAt(mem, 0); n != c.len || err != nil {
					t.Fatalf("the second write: %d %v", n, err)
				}
				return
			}
			n, err := file.ReadAt(mem, 0)
			if n != c.n || err != c.err {
				t.Fatalf("read %d, %v", n, err)
			}
			if !bytes.Equal(mem[:c.real], full[:c.real]) || !bytes.Equal(mem[c.real:], make([]byte, c.len-c.real)) {
				t.Fatal("other bytes are real")
			}
		})
	}
}

func TestFaultHang(t *testing.T) {
	name := filepath.Join(t.TempDir(), "a")
	put(t, name, "A")
	f := New(staging.OS(), MustRules("read **: hang\nread ** 2nd: eio\nstat **: hang enotconn")...)
	file, err := f.OpenFile(name, os.O_RDONLY, 0)
	must(t, err)
	defer file.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer context.AfterFunc(ctx, f.Release)()
	errs := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := file.ReadAt(make([]byte, 1), 0)
			errs <- err
		}()
	}
	statErr := make(chan error, 1)
	go func() { _, err := f.Stat(name); statErr <- err }()
	must(t, f.AwaitHanging(testenv.Context(t), 3))
	if f.Hanging() != 3 || len(errs) != 0 {
		t.Fatalf("%d hang", f.Hanging())
	}
	gone, stop := context.WithCancel(t.Context())
	stop()
	if err := f.AwaitHanging(gone, 4); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	cancel()
	one, two := <-errs, <-errs
	if one != nil {
		one, two = two, one
	}
	if one != nil || !errors.Is(two, unix.EIO) {
		t.Fatalf("released: %v, %v", one, two)
	}
	if err := <-statErr; !errors.Is(err, unix.ENOTCONN) {
		t.Fatal(err)
	}
	if _, err := f.Stat(name); !errors.Is(err, unix.ENOTCONN) {
		t.Fatalf("after the release: %v", err)
	}
	if f.Hanging() != 0 {
		t.Fatalf("%d hang", f.Hanging())
	}
	f.Set(MustRules("stat **: hang")...)
	go func() { _, err := f.Stat(name); statErr <- err }()
	must(t, f.AwaitHanging(testenv.Context(t), 1))
	f.Set() // new rules let the calls of the old ones go
	must(t, <-statErr)
	if err := f.AwaitHanging(testenv.Context(t), 1); err == nil {
		t.Fatal("waited for a hang without rules")
	}
}

func TestFaultDelay(t *testing.T) {
	dir := t.TempDir()
	f := New(staging.OS(), MustRules("stat ** 1st: delay 1ms enoent\nstat **: delay 24h")...)
	done := make(chan error)
	go func() { _, err := f.Stat(dir); done <- err }()
	f.Release() // a delay can be cut short as a hang can
	if err := <-done; !errors.Is(err, unix.ENOENT) {
		t.Fatal(err)
	}
}

// TestFaultOrder has rules that take the same call: the first failure happens, and each is counted once it has struck.
func TestFaultOrder(t *testing.T) {
	f := New(staging.OS(), MustRules("stat ** 2nd: eio\nany ** 2nd: delay 1ns\nstat ** 2nd: enospc")...)
	for n, want := range []error{nil, unix.EIO, nil} {
		if _, err := f.Stat(t.TempDir()); !errors.Is(err, want) {
			t.Errorf("call %d: error %v, want %v", n+1, err, want)
		}
	}
	if got := f.Injected(); got != 2 {
		t.Errorf("%d faults are counted, want 2: the delay and the first failure", got)
	}
}

// TestOpenDirectLearns has a device that takes O_DIRECT at open and refuses the transfers: the first fails, by name,
// and files opened later go through the page cache.
func TestOpenDirectLearns(t *testing.T) {
	dir := t.TempDir()
	f := New(staging.OS(), MustRules("write **/a: einval")...)
	open := func(name string) staging.File {
		t.Helper()
		file, err := staging.OpenDirect(f, filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		must(t, err)
		t.Cleanup(func() { file.Close() })
		return file
	}
	a := open("a")
	if !a.Direct() {
		t.Log("no direct I/O in the temporary directory, nothing to learn")
		return
	}
	if _, err := a.WriteAt(slot(t, staging.Align), 0); !errors.Is(err, staging.ErrAlign) || !errors.Is(err, ErrInjected) || !errors.Is(err, unix.EINVAL) {
		t.Fatalf("direct write that is refused: error %v, want an injected %v", err, staging.ErrAlign)
	}
	b := open("b")
	if b.Direct() {
		t.Fatal("opened direct again")
	}
	if _, err := b.WriteAt([]byte("odd"), 1); err != nil {
		t.Fatal(err)
	}
	elsewhere, err := staging.OpenDirect(staging.OS(), filepath.Join(dir, "c"), os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	defer elsewhere.Close()
	if !elsewhere.Direct() {
		t.Fatal("what a faultfs.FS learned reached the real one")
	}
}

// slot is aligned memory for the length of a test.
func slot(t testing.TB, bytes int) []byte {
	t.Helper()
	s, err := staging.NewSlots(1, bytes)
	must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, staging.ErrSlotsOut) {
			t.Error(err)
		}
	})
	m, _ := s.TryAcquire()
	t.Cleanup(m.Release)
	return m.Bytes()
}

func put(t *testing.T, name, content string) {
	t.Helper()
	must(t, os.WriteFile(name, []byte(content), 0o600))
}

func get(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return string(b)
}

// must ends a test that cannot go on without what failed.
var must = testenv.OK

func TestParseRules(t *testing.T) {
	for text, want := range map[string]Rule{
		"write /root/** 3rd: eio": {Op: staging.OpWrite, Path: "/root/**", When: When{Nth: 3}, Fault: Fault{Errno: unix.EIO}},
		"any **: enospc":          {Op: staging.OpAny, Path: "**", Fault: Fault{Errno: unix.ENOSPC}},
		"read,write *.tmp: short": {Op: staging.OpRead | staging.OpWrite, Path: "*.tmp", Fault: Fault{Short: true, Bytes: -1}},
		"write a 2nd: torn 4097":  {Op: staging.OpWrite, Path: "a", When: When{Nth: 2}, Fault: Fault{Torn: true, Bytes: 4097}},
		"write a 5th-: eio":       {Op: staging.OpWrite, Path: "a", When: When{First: 5}, Fault: Fault{Errno: unix.EIO}},
		"sync a: eio after":       {Op: staging.OpSync, Path: "a", Fault: Fault{Errno: unix.EIO, After: true}},
		"read /a?b/* 12.5% seed 7: delay 20ms eintr": {Op: staging.OpRead, Path: "/a?b/*",
			When: When{Percent: 12.5, Seed: 7}, Fault: Fault{Delay: 20 * time.Millisecond, Errno: unix.EINTR}},
		"lock a: hang":   {Op: staging.OpLock, Path: "a", Fault: Fault{Hang: true}},
		"write a: power": {Op: staging.OpWrite, Path: "a", Fault: Fault{Power: true}},
	} {
		if rules, err := ParseRules(text); err != nil || len(rules) != 1 || rules[0] != want {
			t.Errorf("%q is parsed as %+v, error %v, want %+v", text, rules, err, want)
		}
	}
	for _, text := range []string{
		"write", "write a b c", "wrote a: eio", "write, a: eio", "write : eio", "write a:  ", "write a 0th: eio", "write a -: eio",
		"write a 5th 6th: eio", "write a 0%: eio", "write a NaN%: eio", "write a 101%: eio", "write a seed 3: eio",
		"write a 5% seed x: eio", "write a: efoo", "write a: eio before", "write a: delay eio", "write a: torn 1 2",
		"read a: hang\nread a: hangs",
	} {
		if rules, err := ParseRules(text); !errors.Is(err, ErrRule) {
			t.Errorf("%q is parsed as %+v, error %v, want %v", text, rules, err, ErrRule)
		}
	}
}
