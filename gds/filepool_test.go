package gds

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

// TestHungOperationsAreGivenUp: cuFile does not return. Who asked goes on, other threads take the places of those
// that hang as long as there are not too many, slots stay taken until their operations have ended, and then all is
// as before.
func TestHungOperationsAreGivenUp(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	g, d, double := routed(t, DirectConfig{BufferBytes: 32 << 20, Handles: 2, Limit: time.Minute})
	size := g.cfg.Files
	name := filepath.Join(t.TempDir(), "f")
	f := openFile(t, name, os.O_CREATE|os.O_RDWR)
	s := acquire(t, d, 1<<20)
	testenv.OK(t, s.Write(int(f.Fd()), 0, s.Bytes))
	s.Release()
	double.Rules("cuFileRead:hang")
	d.cfg.Limit = time.Millisecond
	var ends []<-chan struct{}
	for i := range 2 * size { // each thread and its stand-in
		s := acquire(t, d, 1<<20)
		for double.Calls("cuFileRead") == i { // one whose time passes while its thread is being readied is not begun
			err := s.Read(int(f.Fd()), s.Bytes)
			var hung *HungError
			if !errors.Is(err, ErrHung) {
				t.Fatalf("read %d: %v", i, err)
			}
			if errors.As(err, &hung) {
				ends = append(ends, hung.Ended())
				testenv.Until(t, "the call of cuFile", func() bool { return double.Calls("cuFileRead") > i }) // it may be given up before
			}
		}
		s.Release()
	}
	last := acquire(t, d, 1<<20)
	if err := last.Read(int(f.Fd()), last.Bytes); !errors.Is(err, ErrHung) || last.hung != nil ||
		double.Calls("cuFileRead") != 2*size {
		t.Errorf("with all threads away: %v, %d calls", err, double.Calls("cuFileRead"))
	}
	last.Release()
	if out, _ := d.Slots(); out != 2*size || g.Hung() != 2*size {
		t.Errorf("%d slots are in use, %d operations are stuck", out, g.Hung())
	}
	double.Rules("")
	for _, end := range ends {
		<-end
	}
	testenv.Until(t, "no slot in use", func() bool {
		out, _ := d.Slots()
		return out == 0
	})
	d.cfg.Limit = time.Minute
	s = acquire(t, d, 1<<20)
	defer s.Release()
	if err := s.Read(int(f.Fd()), s.Bytes); err != nil || g.Hung() != 0 || len(g.files.idle) != size {
		t.Errorf("afterwards: %v, %d stuck, %d threads", err, g.Hung(), len(g.files.idle))
	}
}

const pausing = "KVHOST_TEST_PAUSED"

// TestPauseIsNoHang: this program is stopped for longer than a call may take, as a machine may be. The calls that were under way end after
// it, and none is given up.
func TestPauseIsNoHang(t *testing.T) {
	if os.Getenv(pausing) == "" {
		child := exec.Command(os.Args[0], "-test.run=^TestPauseIsNoHang$")
		child.Env = append(os.Environ(), pausing+"=1")
		in, err := child.StdinPipe()
		testenv.OK(t, err)
		out, err := child.StdoutPipe()
		testenv.OK(t, err)
		testenv.OK(t, child.Start())
		_, err = out.Read(make([]byte, 1))
		testenv.OK(t, err)
		testenv.OK(t, child.Process.Signal(unix.SIGSTOP))
		time.Sleep(3 * time.Second)
		testenv.OK(t, child.Process.Signal(unix.SIGCONT))
		testenv.OK(t, in.Close())
		said, err := io.ReadAll(out)
		if err = errors.Join(err, child.Wait()); err != nil {
			t.Errorf("want no call given up after a pause, got %v\n%s", err, said)
		}
		return
	}
	g, _ := doubled(t, Config{Threads: 1, Files: 16})
	ctx, over := context.WithCancel(t.Context())
	var calls sync.WaitGroup
	for range 64 {
		calls.Go(func() {
			for ctx.Err() == nil {
				if _, err := g.DoFileFor(2*time.Second, func(*Thread) error { time.Sleep(20 * time.Millisecond); return nil }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	_, err := os.Stdout.Write([]byte("\n"))
	testenv.OK(t, err)
	_, _ = os.Stdin.Read(make([]byte, 1))
	over()
	calls.Wait()
}

// TestCloseLeavesWhatHangs: a GPU is closed while an operation that was given up is still under way. Close says so
// and does not wait, what the operation uses stays, and its thread is another GPU's when it has ended.
func TestCloseLeavesWhatHangs(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1, Files: 1})
	block := make(chan struct{})
	var hung *HungError
	for hung == nil { // on a busy machine the time may pass before the thread is asked
		if _, err := g.DoFileFor(time.Millisecond, func(*Thread) error { <-block; return nil }); !errors.Is(err,
			ErrHung) {
			t.Fatal(err)
		} else {
			errors.As(err, &hung)
		}
	}
	if err := g.DoFile(func(*Thread) {}); err != nil { // on the thread that took the place
		t.Error(err)
	}
	if err := g.Close(); !errors.Is(err, ErrHung) {
		t.Errorf("Close: %v", err)
	}
	if ran, err := g.DoFileFor(time.Minute, func(*Thread) error { return nil }); ran || !errors.Is(err, ErrClosed) {
		t.Errorf("on a closed GPU: %v, %v", ran, err)
	}
	close(block)
	<-hung.Ended()
	double.Forget()
	again, err := g.driver.OpenGPU(g.UUID, Config{Threads: 2, Files: 2})
	testenv.OK(t, err)
	testenv.NoError(t, again.Close())
}

// TestPanicOfAnAbandonedCallIsLogged: nobody waits for the call any more, so the log is where its panic goes.
func TestPanicOfAnAbandonedCallIsLogged(t *testing.T) {
	g, _ := doubled(t, Config{Threads: 1, Files: 1})
	var log bytes.Buffer
	g.driver.log = slog.New(slog.NewTextHandler(&log, nil))
	block := make(chan struct{})
	var hung *HungError
	for hung == nil { // on a busy machine the time may pass before the thread is asked
		_, err := g.DoFileFor(time.Millisecond, func(*Thread) error { <-block; panic("late and wrong") })
		if !errors.As(err, &hung) && !errors.Is(err, ErrHung) {
			t.Fatal(err)
		}
	}
	close(block)
	<-hung.Ended()
	if got := log.String(); !strings.Contains(got, "late and wrong") || !strings.Contains(got, g.UUID.String()) {
		t.Errorf("log: %s", got)
	}
	if err := g.DoFile(func(*Thread) {}); err != nil || g.Hung() != 0 {
		t.Errorf("afterwards: %v, %d stuck", err, g.Hung())
	}
}
