package server

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"golang.org/x/sys/unix"
)

// hostInGroup is the environment variable that makes TestPagesAreTheirClients the host.
const hostInGroup = "KVHOST_TEST_HOST_IN_GROUP"

// group is a memory cgroup of the test's own.
type group string

func newGroup(t *testing.T) group {
	t.Helper()
	testenv.Need(t, testenv.MemoryCgroup, testenv.UserFaults)
	dir, err := os.MkdirTemp(testenv.MemoryCgroups(), "kvhost-test-")
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, os.Remove(dir))
	})
	return group(dir)
}

func (g group) enter(t *testing.T, pid int) {
	t.Helper()
	testenv.OK(t, os.WriteFile(filepath.Join(string(g), "cgroup.procs"), []byte(strconv.Itoa(pid)), 0))
}

// sharedMemory is what the group is charged for pages of shared memory, in bytes.
func (g group) sharedMemory(t *testing.T) int64 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(string(g), "memory.stat"))
	testenv.OK(t, err)
	for line := range strings.Lines(string(text)) {
		if n, ok := strings.CutPrefix(line, "shmem "); ok {
			bytes, err := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
			testenv.OK(t, err)
			return bytes
		}
	}
	t.Fatalf("memory.stat says nothing of shmem:\n%s", text)
	return 0
}

// A host in a memory cgroup of its own is never charged for its clients' pages: not for those that a client has not touched
// when it registers them, and not for those that it takes out of its memory later. Its jobs fail, and nobody else's.
func TestPagesAreTheirClients(t *testing.T) {
	if os.Getenv(hostInGroup) != "" {
		serveInGroup(t)
		return
	}
	g := newGroup(t)
	socket := startInGroup(t, g)
	const most = 1 << 20 // of shared memory that is the host's own, or its files' where they are in a tmpfs
	const places = 256
	bytes := int64(planes) * places * chunkBlocks * pageBytes
	var regions []client.PlaneRegion
	for pl := range int64(planes) {
		regions = append(regions, client.PlaneRegion{Offset: pl * bytes / planes, Stride: pageBytes, Blocks: places * chunkBlocks})
	}
	start := g.sharedMemory(t)
	dial := func(engine string) *client.Session {
		s, err := client.Dial(t.Context(), client.Hello{
			Socket: socket, Engine: engine, Role: "worker", LocalRanks: 1, Namespace: testNamespace(),
		})
		testenv.OK(t, err)
		t.Cleanup(func() { s.Close() })
		return s
	}
	loadAll := func(s *client.Session) (failed int) {
		for i := range places {
			l, err := s.Lookup(t.Context(), client.LookupRequest{Keys: keys(1)})
			if err != nil || l.Hits() != 1 {
				t.Fatal(l, err)
			}
			job, err := s.Load(t.Context(), l, []client.LoadChunk{{Blocks: blocks(i)}}, client.LoadOptions{})
			testenv.OK(t, err)
			if res, err := job.Wait(t.Context()); err != nil {
				t.Fatal(err)
			} else if len(res.Failed) > 0 {
				failed++
			}
		}
		return failed
	}

	honest := dial("honest")
	arena, err := honest.NewArena(bytes)
	testenv.OK(t, err)
	defer arena.Close()
	if _, err := honest.Register(t.Context(), 0, arena, regions); err != nil {
		t.Fatal(err)
	}
	p := &peer{Session: honest, t: t, arena: arena}
	if res, err := p.store([]client.StoreChunk{chunkOf(0, 0)}); err != nil || res.Chunks[0].Result != client.Stored {
		t.Fatal(res, err)
	}
	if failed := loadAll(honest); failed > 0 {
		t.Errorf("%d loads of the honest client failed", failed)
	}
	if n := g.sharedMemory(t) - start; n > most {
		t.Errorf("the host is charged for %d KiB of an arena that its client made", n>>10)
	}

	hostile := dial("hostile")
	holes, err := client.NewArena(bytes)
	testenv.OK(t, err)
	defer holes.Close()
	takeOut := func() {
		testenv.OK(t, unix.Madvise(holes.Bytes(), unix.MADV_REMOVE))
	}
	takeOut()
	if _, err := hostile.Register(t.Context(), 0, holes, regions); err == nil {
		loadAll(hostile)
		t.Error("memory that is not allocated was registered")
	} else if !errors.Is(err, client.ErrArena) || !strings.Contains(err.Error(), "not allocated") {
		t.Error(err)
	}
	if n := g.sharedMemory(t) - start; n > most {
		t.Errorf("the host is charged for %d KiB of untouched memory", n>>10)
	}

	clear(holes.Bytes())
	hostile = dial("punching")
	if _, err := hostile.Register(t.Context(), 0, holes, regions); err != nil {
		t.Fatal(err)
	}
	takeOut()
	if failed := loadAll(hostile); failed != places {
		t.Errorf("%d loads of %d to pages that were taken out failed", failed, places)
	}
	p.Session = hostile
	if res, err := p.store([]client.StoreChunk{chunkOf(1, 1)}); err != nil || res.Chunks[0].Result != client.Failed {
		t.Errorf("a store of pages that were taken out: %+v, %v", res, err)
	}
	if n := g.sharedMemory(t) - start; n > most {
		t.Errorf("the host is charged for %d KiB of memory that was taken out", n>>10)
	}
	if failed := loadAll(honest); failed > 0 {
		t.Errorf("%d loads of the honest client failed", failed)
	}
}

// startInGroup starts a host in a process of its own, in a memory cgroup, and returns its socket.
func startInGroup(t *testing.T, g group) string {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestPagesAreTheirClients$")
	cmd.Env = append(os.Environ(), hostInGroup+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	testenv.OK(t, err)
	out, err := cmd.StdoutPipe()
	testenv.OK(t, err)
	testenv.OK(t, cmd.Start())
	t.Cleanup(func() {
		in.Close() // its end
		if err := cmd.Wait(); err != nil {
			t.Errorf("the host: %v", err)
		}
	})
	g.enter(t, cmd.Process.Pid)
	if _, err := fmt.Fprintln(in, "begin"); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	testenv.OK(t, err)
	return strings.TrimSpace(line)
}

// serveInGroup is the host, from the first line of its input to the end of it.
func serveInGroup(t *testing.T) {
	in := bufio.NewReader(os.Stdin)
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	fmt.Println(newRig(t, nil).socket)
	_, _ = in.ReadString('\n')
}

// Where the kernel gives the host no userfaultfd, only the operator's processes share memory with it.
func TestUnprotectedMemoryIsTheOperators(t *testing.T) {
	r := newRig(t, nil)
	r.server.mu.Lock()
	r.server.protect = func([]byte) error { return errUnprotected }
	r.server.mu.Unlock()
	p := r.dial(nil)
	p.save(0, 1)
	testenv.OK(t, p.regs[0].Unregister(t.Context()))
	x := only(r.server)
	x.inbox.Turn.Lock()
	x.memory.trusted = false
	x.inbox.Turn.Unlock()
	arena, err := client.NewArena(planes * arenaBlocks * pageBytes)
	testenv.OK(t, err)
	defer arena.Close()
	if _, err := p.Register(t.Context(), 0, arena, groupRegions(0)); !errors.Is(err, client.ErrDenied) ||
		!strings.Contains(err.Error(), "userfaultfd") {
		t.Error(err)
	}
}

// sharedMemory makes POSIX shared memory that nothing seals.
func sharedMemory(t *testing.T, bytes int64) *os.File {
	t.Helper()
	testenv.Need(t, testenv.SharedMemory)
	dir, err := os.MkdirTemp("/dev/shm", "kvhost")
	testenv.OK(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	f, err := os.Create(filepath.Join(dir, "pages"))
	testenv.OK(t, err)
	testenv.OK(t, f.Truncate(bytes))
	return f
}

// Memory that can shrink is refused unless HELLO allows it. Then a shrink fails the jobs that touch the lost pages, in their
// order by semaphores too, and neither their entries nor another session.
func TestUnsealedMemory(t *testing.T) {
	r := newRig(t, nil)
	other := r.dial(nil)
	other.save(0, 2)
	const bytes = planes * arenaBlocks * pageBytes
	open := func(allowed bool) (*client.Session, *os.File, *client.Arena) {
		h := r.hello()
		h.UnsealedMemory = allowed
		s, err := client.Dial(t.Context(), h)
		testenv.OK(t, err)
		t.Cleanup(func() { s.Close() })
		f := sharedMemory(t, bytes)
		a, err := client.OpenArena(f)
		testenv.OK(t, err)
		t.Cleanup(func() { a.Close() })
		return s, f, a
	}
	s, _, a := open(false)
	if _, err := s.Register(t.Context(), 0, a, groupRegions(0)); !errors.Is(err, client.ErrArena) {
		t.Fatalf("HELLO does not allow it: %v", err)
	}

	s, f, a := open(true)
	if _, err := s.Register(t.Context(), 0, a, groupRegions(0)); err != nil {
		t.Fatal(err)
	}
	p := &peer{Session: s, t: t, arena: a}
	p.save(2, 3)
	if res := p.loaded(p.loads(p.look(3), 3)); len(res.Failed) > 0 {
		t.Fatal(res.Failed)
	}
	counters, err := client.NewArena(4096)
	testenv.OK(t, err)
	defer counters.Close()
	w, err := s.ShareSemaphores(t.Context(), counters, 0, 8)
	testenv.OK(t, err)
	held, err := s.Store(t.Context(), 0, 0, []client.StoreChunk{chunkOf(7, 7)},
		client.WithTimeline(&client.Timeline{Semaphores: w, WaitValue: 1, Done: 1, DoneValue: 1, Status: 2}))
	testenv.OK(t, err)
	testenv.OK(t, f.Truncate(0))
	w.Store(0, 1)
	if res, err := held.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Failed ||
		!errors.Is(res.Chunks[0].Err, client.ErrInvalid) || w.Load(2) != client.StatusFailed {
		t.Errorf("a store of pages that are gone: %+v, %v, status %d", res, err, w.Load(2))
	}
	l, err := s.Lookup(t.Context(), client.LookupRequest{Keys: keys(3)})
	if err != nil || l.Hits() != 3 {
		t.Fatal(l, err)
	}
	load, err := s.Load(t.Context(), l, []client.LoadChunk{{Index: 1, Blocks: blocks(1)}}, client.LoadOptions{})
	testenv.OK(t, err)
	if res := p.loaded(load); len(res.Failed) != chunkBlocks || !errors.Is(res.Failed[0].Err, client.ErrInvalid) {
		t.Errorf("a load to pages that are gone: %+v", res)
	}
	other.check(3)
	testenv.NoError(t, s.Ping(t.Context()))
}

// Clients that map shared memory until there is none left are refused it by name, all but those that have theirs; the host and the others go on.
func TestSharedMemoryIsUsedUp(t *testing.T) {
	const bytes, clients, fit = planes * arenaBlocks * pageBytes, 8, 3
	dir := testenv.SmallDisk(t, fit*bytes)
	r := newRig(t, nil)
	other := r.dial(nil)
	other.save(0, 2)
	arenas := make(chan *client.Arena, clients)
	var work sync.WaitGroup
	for i := range clients {
		work.Go(func() {
			f, err := os.Create(filepath.Join(dir, strconv.Itoa(i)))
			testenv.NoError(t, err)
			testenv.NoError(t, f.Truncate(bytes))
			a, err := client.OpenArena(f)
			if err == nil {
				arenas <- a
				return
			}
			if !errors.Is(err, client.ErrArena) || !errors.Is(err, unix.ENOSPC) {
				t.Errorf("memory that is not there: %v, want %v that says %v", err, client.ErrArena, unix.ENOSPC)
			}
			testenv.NoError(t, os.Remove(f.Name())) // some of it may be there
			testenv.NoError(t, f.Close())
		})
	}
	work.Wait()
	close(arenas)
	if n := len(arenas); n == 0 || n > fit {
		t.Errorf("%d clients have their memory, want 1 to %d", n, fit)
	}
	n := 2
	for a := range arenas {
		h := r.hello()
		h.UnsealedMemory = true
		s, err := client.Dial(t.Context(), h)
		testenv.OK(t, err)
		_, err = s.Register(t.Context(), 0, a, groupRegions(0))
		testenv.OK(t, err)
		p := &peer{Session: s, t: t, arena: a}
		p.save(n, n+1)
		if n++; p.look(n).Hits() != n {
			t.Errorf("what was stored from memory that is there is no hit")
		}
		if res := p.loaded(p.loads(p.look(n), n)); len(res.Failed) > 0 {
			t.Errorf("a load to memory that is there: %+v", res)
		}
		testenv.NoError(t, s.Close())
		testenv.NoError(t, a.Close())
	}
	other.check(2)
}

// Semaphores in memory that is gone cancel the jobs that wait for them.
func TestSemaphoresInMemoryThatIsGone(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(func(h *client.Hello) { h.UnsealedMemory = true })
	f := sharedMemory(t, 4096)
	a, err := client.OpenArena(f)
	testenv.OK(t, err)
	defer a.Close()
	w, err := p.ShareSemaphores(t.Context(), a, 0, 8)
	testenv.OK(t, err)
	order := &client.Timeline{Semaphores: w, WaitValue: 1, Done: 1, DoneValue: 1, Status: -1}
	job, err := p.Store(t.Context(), 0, 0, []client.StoreChunk{chunkOf(0, 0)}, client.WithTimeline(order))
	testenv.OK(t, err)
	testenv.OK(t, f.Truncate(0))
	if res, err := job.Published(t.Context()); err != nil || !res.Cancelled {
		t.Errorf("cancelled store: got %+v, %v", res, err)
	}
	testenv.NoError(t, p.Ping(t.Context()))
}

// touch reads or writes a byte and says whether that raised a fault.
func touch(p *byte, write bool) (faulted bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { faulted = recover() != nil }()
	if write {
		*p = 1
	} else {
		sink = *p
	}
	return false
}

var sink byte

// An access to a missing page of a protected mapping fails and allocates nothing. Other pages are as in any mapping, also those
// that come and go.
func TestProtectedMapping(t *testing.T) {
	testenv.Need(t, testenv.UserFaults)
	page := os.Getpagesize()
	size := int64(4 * page)
	fd, err := unix.MemfdCreate("pages", unix.MFD_CLOEXEC)
	testenv.OK(t, err)
	f := os.NewFile(uintptr(fd), "pages")
	defer f.Close()
	testenv.OK(t, f.Truncate(size))
	testenv.OK(t, unix.Fallocate(fd, 0, 0, size/2))
	data, err := mapFile(f, size)
	testenv.OK(t, err)
	defer unix.Munmap(data)
	testenv.OK(t, protect(data))
	allocated := func() int64 {
		var st unix.Stat_t
		testenv.OK(t, unix.Fstat(fd, &st))
		return st.Blocks * 512
	}
	for i := range 4 {
		for _, write := range []bool{false, true} {
			if got := touch(&data[i*page+7], write); got != (i >= 2) {
				t.Errorf("page %d, write %t: faulted %t", i, write, got)
			}
		}
	}
	if n := allocated(); n != size/2 {
		t.Errorf("%d bytes are allocated", n)
	}
	if _, err := f.WriteAt([]byte{9}, 3*int64(page)); err != nil { // as its client does
		t.Fatal(err)
	}
	if touch(&data[3*page], false) || sink != 9 || touch(&data[3*page], true) {
		t.Error("a page that came is not there")
	}
	testenv.OK(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(page)))
	if !touch(&data[7], true) || !touch(&data[7], false) || allocated() != size/2 {
		t.Errorf("a page that went: %d bytes are allocated", allocated())
	}
}
