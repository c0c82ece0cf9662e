package command

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/testkit/fusefs"
	"github.com/kvhost/kvhost/host/kv"
)

// pieceFiles lists the pieces below a root.
func pieceFiles(t *testing.T, root string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(name string, e os.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && !e.IsDir() && strings.HasSuffix(name, ".kv") {
			names = append(names, name)
		}
		return err
	})
	testenv.OK(t, err)
	return names
}

// awaitGauge waits for the sum of a metric's series.
func awaitGauge(t *testing.T, address, name string, want int64, logged func() string) {
	t.Helper()
	got := int64(-1)
	defer func() {
		if got != want {
			t.Logf("%s is %d, want %d\n%s", name, got, want, logged())
		}
	}()
	until(t, name, func() bool { got = gauge(t, address, name); return got == want })
}

func (p *killPeer) hits(t *testing.T, n int) int {
	t.Helper()
	l := p.Find(killKey(n))
	defer l.Release(t.Context())
	return l.Hits()
}

// awaitHang waits until the file system has let an operation hang.
func awaitHang(t *testing.T, m *fusefs.Mount) {
	t.Helper()
	testenv.Until(t, "an operation that hangs", func() bool {
		n, err := m.Injected()
		testenv.OK(t, err)
		return n > 0
	})
}

// TestHungRoot makes system calls of a real host hang, below the kernel: those that open or read a piece's file. The load's cancel is acknowledged at once, its blocks fail, the root goes out of service and the log says
// why. When the call has returned, the root is back.
func TestHungRoot(t *testing.T) {
	t.Parallel() // it waits more than it works
	testenv.Need(t, testenv.FUSE)
	dir, mounted := shortDir(t), t.TempDir()
	m, err := fusefs.New(t.TempDir(), mounted)
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, m.Unmount())
	})
	_, logged, stop := startHost(t, dir, "--root", filepath.Join(mounted, "kv")+"=64MiB", "--socket", "s", "--http-listen", anyPort,
		"--store-io-timeout", "5s")
	address := httpAddress(t, logged)
	p := dialToKill(t, filepath.Join(dir, "s"))
	p.mustStore(t, 0)
	testenv.OK(t, m.Set("open,read **.kv: hang"))
	load, err := p.Load(t.Context(), p.Find(killKey(0)), []client.LoadChunk{{Blocks: killIDs(2)}}, client.LoadOptions{})
	testenv.OK(t, err)
	awaitHang(t, m)
	if err := load.Cancel(t.Context()); err != nil {
		t.Errorf("the cancel of a load that hangs: %v", err)
	}
	awaitGauge(t, address, "kvhost_root_state", 3, logged)
	if res, err := load.Wait(testenv.Context(t)); err == nil && !res.Cancelled && len(res.Failed) == 0 {
		t.Errorf("a load that hangs: %+v", res)
	}
	if p.hits(t, 0) != 0 {
		t.Error("a hit in a root that hangs")
	}
	if got := p.outcome(1); got.Result != client.Failed || !strings.Contains(fmt.Sprint(got.Err), "out of service") {
		t.Errorf("a store to a root that hangs %s: %v", got.Result, got.Err)
	}
	if !strings.Contains(logged(), "no answer after") {
		t.Errorf("the log does not say why:\n%s", logged())
	}
	testenv.OK(t, m.Set(""))
	awaitGauge(t, address, "kvhost_root_state", 0, logged)
	p.mustStore(t, 1)
	p.loads(t, 1)
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

// TestRootDeleted removes one of a host's two root directories. The other root serves and takes the stores, and a new
// directory is used again.
func TestRootDeleted(t *testing.T) {
	dir := shortDir(t)
	_, logged, stop := startHost(t, dir, "--root", "a=64MiB", "--root", "b=64MiB", "--socket", "s", "--http-listen",
		anyPort)
	address := httpAddress(t, logged)
	p := dialToKill(t, filepath.Join(dir, "s"))
	const chunks = 8
	for n := range chunks {
		p.mustStore(t, n)
	}
	lost := len(pieceFiles(t, filepath.Join(dir, "a")))
	if lost == 0 || lost == chunks {
		t.Fatalf("%d of %d chunks are in the first root", lost, chunks)
	}
	// To delete it takes time in which the host would make its lock file again, so it goes at once and is deleted then.
	gone := filepath.Join(dir, "gone")
	testenv.OK(t, os.Rename(filepath.Join(dir, "a"), gone))
	awaitGauge(t, address, "kvhost_root_state", 3, logged) // the other's is 0
	testenv.OK(t, os.RemoveAll(gone))
	if !strings.Contains(logged(), "its directory is gone") {
		t.Errorf("the log does not say why:\n%s", logged())
	}
	kept := 0
	for n := range chunks {
		if p.hits(t, n) == 1 {
			kept++
		}
	}
	if kept != chunks-lost {
		t.Errorf("%d of %d chunks are hits, %d were in the root that is gone", kept, chunks, lost)
	}
	for n := range chunks {
		p.mustStore(t, n+chunks)
	}
	p.loads(t, 2*chunks-1)
	if _, err := os.Stat(filepath.Join(dir, "a")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the host has made the directory again, wherever that is: %v", err)
	}
	held, err := p.Store(t.Context(), 0, 0, []client.StoreChunk{{Key: killKey(90), Blocks: killIDs(1)}},
		client.WithTimeline(&client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 1, DoneValue: 1, Status: -1}))
	testenv.OK(t, err)
	if err := held.Cancel(t.Context()); err != nil {
		t.Errorf("cancel: %v", err)
	}
	testenv.OK(t, os.Mkdir(filepath.Join(dir, "a"), 0o700))
	awaitGauge(t, address, "kvhost_root_state", 0, logged)
	for n := range chunks {
		p.mustStore(t, n+2*chunks)
	}
	if len(pieceFiles(t, filepath.Join(dir, "a"))) == 0 {
		t.Error("nothing goes to the root that is back")
	}
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

// A host whose GPU fails while it runs reports it in a metric at once, and in its exit code at the end.
func TestLostGPUIsSaid(t *testing.T) {
	dir, double := shortDir(t), gdstest.Build(t)
	cmd := command(t, dir, "--http-listen", anyPort, "--gds-max-device-memory=0")
	cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Dir(double.Path),
		"KVHOST_DOUBLE=cuIpcOpenMemHandle_v2:code=719")
	_, logged, stop := startCommand(t, cmd)
	address := httpAddress(t, logged)
	inService := func() string {
		r, err := http.Get("http://" + address + "/metrics")
		testenv.OK(t, err)
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		testenv.OK(t, err)
		_, value, _ := strings.Cut(string(text), `kvhost_gpu_in_service{gpu="`+gdstest.UUID+`"} `)
		return value[:min(1, len(value))]
	}
	if v := inService(); v != "1" {
		t.Errorf("in service: %q", v)
	}
	s, err := client.Dial(t.Context(), client.Hello{
		Socket: filepath.Join(dir, "kvhost.sock"), Engine: "e", Role: "worker", LocalRanks: 1, DeviceUUID: gdstest.UUID,
		Namespace: kv.Namespace{Model: "m", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16,
			Groups: []kv.Group{{Geometry: kv.Uniform(2, 1, 1, 8192)}}},
	})
	testenv.OK(t, err)
	defer s.Close()
	if _, err := s.RegisterIPC(t.Context(), 0, [][]byte{make([]byte, 64)},
		[]client.PlaneRegion{{Stride: 8192, Blocks: 8}}); err == nil {
		t.Error("memory of a lost GPU was registered")
	}
	if v := inService(); v != "0" {
		t.Errorf("in service: %q", v)
	}
	if err := s.Ping(t.Context()); err != nil { // the host goes on
		t.Error(err)
	}
	if code := stop(syscall.SIGTERM); code != exitGPU || !strings.Contains(logged(), "out of service") {
		t.Errorf("exit code %d\n%s", code, logged())
	}
}
