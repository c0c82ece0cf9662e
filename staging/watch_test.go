package staging_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// pausing is set for the process that is stopped.
const pausing = "KVHOST_TEST_PAUSING"

// A process that was stopped for longer than the limit, or a machine that was, gives up nothing that ends when it goes on.
func TestPauseIsNoHang(t *testing.T) {
	if os.Getenv(pausing) == "" {
		child := exec.Command(os.Args[0], "-test.run=^TestPauseIsNoHang$")
		child.Env = append(os.Environ(), pausing+"=1")
		in, err := child.StdinPipe()
		must(t, err)
		out, err := child.StdoutPipe()
		must(t, err)
		must(t, child.Start())
		_, err = out.Read(make([]byte, 1))
		must(t, err)
		must(t, child.Process.Signal(unix.SIGSTOP))
		time.Sleep(3 * time.Second)
		must(t, child.Process.Signal(unix.SIGCONT))
		must(t, in.Close())
		said, err := io.ReadAll(out)
		if err = errors.Join(err, child.Wait()); err != nil {
			t.Errorf("want no operation given up after a pause, got %v\n%s", err, said)
		}
		return
	}
	slow := &staging.Around{Inner: staging.OS(), Run: func(c staging.Call) error { time.Sleep(100 * time.Millisecond); return c.Do() }}
	w := staging.Watched(slow, staging.Watch{Limit: 2 * time.Second})
	defer w.Close()
	ctx, over := context.WithCancel(t.Context())
	var calls sync.WaitGroup
	for range 200 {
		calls.Go(func() {
			for ctx.Err() == nil {
				if _, err := w.Stat("/"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	_, err := os.Stdout.Write([]byte("\n"))
	must(t, err)
	_, _ = os.Stdin.Read(make([]byte, 1))
	over()
	calls.Wait()
}

func TestWatchedAdmits(t *testing.T) {
	refuse := errors.New("not now")
	var out atomic.Bool
	var seen atomic.Int64
	w := staging.Watched(staging.OS(), staging.Watch{
		Limit: time.Minute, Seen: func(staging.Op, string, error) { seen.Add(1) },
		Admit: func(staging.Op) error {
			if out.Load() {
				return refuse
			}
			return nil
		},
	})
	defer w.Close()
	name := filepath.Join(t.TempDir(), "f")
	f, err := staging.OpenDirect(w, name, os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	if _, err := w.Stat(name + "2"); !errors.Is(err, fs.ErrNotExist) || seen.Load() != 1 {
		t.Error(err)
	}
	out.Store(true)
	if _, err := w.Stat(name); !errors.Is(err, refuse) {
		t.Error(err)
	}
	if _, err := f.ReadAt(make([]byte, 4), 0); !errors.Is(err, refuse) {
		t.Error(err)
	}
	if err := f.Close(); err != nil { // or it would leak
		t.Error(err)
	}
	if seen.Load() != 1 {
		t.Error("a refusal of the watch was told to it")
	}
}

// TestWatchedTransfers reads what was written, on many goroutines and with no limit as well as with one.
func TestWatchedTransfers(t *testing.T) {
	for _, limit := range []time.Duration{0, time.Minute} {
		w := staging.Watched(staging.OS(), staging.Watch{Limit: limit})
		f, err := w.OpenFile(filepath.Join(t.TempDir(), "f"), os.O_RDWR|os.O_CREATE, 0o600)
		must(t, err)
		done := make(chan error)
		for g := range 8 {
			go func() {
				want, got := bytes.Repeat([]byte{byte(g + 1)}, 100), make([]byte, 100)
				for range 200 {
					if _, err := f.WriteAt(want, int64(g)*100); err != nil {
						done <- err
						return
					}
					clear(got)
					if _, err := f.ReadAt(got, int64(g)*100); err != nil || !bytes.Equal(got, want) {
						done <- errors.Join(err, errors.New("other bytes"))
						return
					}
				}
				done <- nil
			}()
		}
		for range 8 {
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		testenv.NoError(t, f.Close())
		w.Close()
	}
}

// heldFS is a file system of one file, where a read ends when it is told to, and has left something under way.
type heldFS struct {
	staging.FS
	file *heldFile
}

type heldFile struct {
	staging.File
	returns, ended chan struct{}
}

type heldError struct{ file *heldFile }

func (f heldFS) OpenFile(string, int, fs.FileMode) (staging.File, error) { return f.file, nil }

func (f *heldFile) Name() string { return "f" }
func (f *heldFile) ReadAt([]byte, int64) (int, error) {
	<-f.returns
	return 0, heldError{f}
}

func (e heldError) Error() string          { return "given up" }
func (e heldError) Ended() <-chan struct{} { return e.file.ended }

// TestWatchedHolds: memory of a read that was given up is in use until what it has left under way has ended.
func TestWatchedHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := &heldFile{returns: make(chan struct{}), ended: make(chan struct{})}
		w := staging.Watched(heldFS{file: inner}, staging.Watch{Limit: time.Minute})
		defer w.Close()
		f, err := w.OpenFile("f", os.O_RDONLY, 0)
		must(t, err)
		_, err = f.ReadAt(make([]byte, 8), 0)
		var hung *staging.HungError
		if !errors.As(err, &hung) {
			t.Fatalf("%v, want the read given up", err)
		}
		close(inner.returns)
		synctest.Wait()
		select {
		case <-hung.Ended():
			t.Error("the memory is said to be free, and is written to")
		default:
		}
		close(inner.ended)
		<-hung.Ended()
	})
}

// must ends a test that cannot go on without what failed.
var must = testenv.OK

func TestOnRemoveTellsWhatWasRemoved(t *testing.T) {
	type id struct{ dev, ino uint64 }
	var told []id
	var refused error
	inner := &staging.Around{Inner: staging.OS(), Run: func(c staging.Call) error {
		if c.Op == staging.OpRemove && refused != nil {
			return refused
		}
		return c.Do()
	}}
	fsys := staging.OnRemove(inner, func(dev, ino uint64) { told = append(told, id{dev, ino}) })
	dir := t.TempDir()
	name := filepath.Join(dir, "f")
	f, err := staging.OpenDirect(fsys, name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	must(t, err)
	defer f.Close()
	info, err := f.Stat()
	must(t, err)
	refused = unix.EIO
	if err := fsys.Remove(name); err == nil || len(told) > 0 {
		t.Errorf("%v, told of %v", err, told)
	}
	refused = nil
	if err := fsys.Remove(name); err != nil || len(told) != 1 || told[0] != (id{info.Dev, info.Ino}) {
		t.Errorf("%v, told of %v", err, told)
	}
	if err := fsys.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := errors.Join(fsys.Mkdir(filepath.Join(dir, "d"), 0o700), fsys.Remove(filepath.Join(dir, "d"))); err != nil || len(told) != 1 {
		t.Errorf("%v, told of %v", err, told)
	}
}
