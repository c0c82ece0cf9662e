package nixl_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/nixl"
)

const (
	lenderEnv   = "KVHOST_TEST_NIXL_LENDER"   // makes the test's binary a process that lends
	borrowerEnv = "KVHOST_TEST_NIXL_BORROWER" // or one that reads, again and again
	manyEnv     = "KVHOST_TEST_NIXL_MANY"     // gives the lender a name of its process
	learnerEnv  = "KVHOST_TEST_NIXL_LEARNER"  // or one that is told nonsense of another agent
	lent        = 4 << 20                     // bytes of each of its regions
	poison      = 0xa5
	transports  = "UCX_TLS"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(lenderEnv); path != "" {
		lend(path)
		return
	}
	if path := os.Getenv(borrowerEnv); path != "" {
		borrow(path)
	}
	if path := os.Getenv(learnerEnv); path != "" {
		learn(path)
		return
	}
	os.Exit(m.Run())
}

// lend registers a region, tells of it, and goes on with each line of the input, until its end.
func lend(path string) {
	l, err := nixl.Open(path)
	must(err)
	name := "lender"
	if os.Getenv(manyEnv) != "" {
		name = fmt.Sprint(name, os.Getpid())
	}
	a, err := l.Agent(name, 2)
	must(err)
	in := bufio.NewScanner(os.Stdin)
	for n := byte(0); ; n++ {
		mem := mapped(lent)
		fill(mem, n)
		must(a.Register(mem))
		metadata, err := a.Metadata()
		must(err)
		fmt.Print(describe(mem, metadata))
		if !in.Scan() {
			must(a.Close())
			return
		}
	}
}

// borrow reads what the input describes until the process is killed.
func borrow(path string) {
	l, err := nixl.Open(path)
	must(err)
	a, err := l.Agent(fmt.Sprint("borrower", os.Getpid()), 2)
	must(err)
	mem := mapped(lent)
	must(a.Register(mem))
	from, metadata, err := parse(bufio.NewReader(os.Stdin))
	must(err)
	must(a.Load("borrower", metadata))
	for n := 0; ; n++ {
		read, err := a.Read(mem, "borrower", []nixl.Part{{Address: from, Bytes: lent}})
		must(err)
		for done := false; !done; {
			done, err = read.Done()
			must(err)
		}
		if n == 0 {
			fmt.Println("it reads")
		}
	}
}

// learn loads metadata of an agent with bits that are others, or without an end. Another agent can be read all the same.
func learn(path string) {
	const seed, times = 53, 300
	l, err := nixl.Open(path)
	must(err)
	lies, err := l.Agent("lies", 1)
	must(err)
	lends, err := l.Agent("lends", 1)
	must(err)
	reads, err := l.Agent("reads", 1)
	must(err)
	from, to := mapped(lent), mapped(lent)
	fill(from, 1)
	must(lies.Register(from))
	must(lends.Register(from))
	must(reads.Register(to))
	good, err := lies.Metadata()
	must(err)
	random := rand.New(rand.NewPCG(seed, 0))
	loaded := 0
	for range times {
		m := slices.Clone(good)
		for range 1 + random.IntN(4) {
			m[random.IntN(len(m))] ^= 1 << random.IntN(8)
		}
		if random.IntN(4) == 0 {
			m = m[:random.IntN(len(m))]
		}
		if len(m) > 0 && reads.Load("lies", m) == nil {
			loaded++
		}
		_ = reads.Forget("lies")
	}
	good, err = lends.Metadata()
	must(err)
	must(reads.Load("lends", good))
	read, err := reads.Read(to, "lends", []nixl.Part{{Address: at(from), Bytes: lent}})
	must(err)
	for done := false; !done; {
		done, err = read.Done()
		must(err)
	}
	fmt.Println(loaded, "of", times, "were loaded, right:", bytes.Equal(from, to))
}

// TestNonsenseInMetadata: a peer that says nonsense of its memory does not end the process that is told.
func TestNonsenseInMetadata(t *testing.T) {
	testenv.Need(t, testenv.NIXL, testenv.OthersMemory)
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), learnerEnv+"="+path())
	out, err := c.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("right: true")) {
		t.Errorf("%v: %s", err, out[max(0, len(out)-2000):])
	}
}

// describe is a line with a region and the metadata of its agent, and parse reads one.
func describe(mem, metadata []byte) string {
	return fmt.Sprintln(at(mem), base64.StdEncoding.EncodeToString(metadata))
}

func parse(in *bufio.Reader) (at uint64, metadata []byte, err error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return 0, nil, err
	}
	var text string
	if _, err = fmt.Sscan(line, &at, &text); err == nil {
		metadata, err = base64.StdEncoding.DecodeString(text)
	}
	return at, metadata, err
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func mapped(n int) []byte {
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	must(err)
	return mem
}

func at(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// fill writes what region n has.
func fill(mem []byte, n byte) {
	r := rand.NewChaCha8([32]byte{n})
	_, _ = r.Read(mem)
}

func content(n byte) []byte {
	b := make([]byte, lent)
	fill(b, n)
	return b
}

func poisoned(mem []byte) bool { return bytes.Count(mem, []byte{poison}) == len(mem) }

func path() string { return filepath.Join(testenv.Root(), ".build", "nixl") }

// rig is an agent with memory, and another process that lends.
type rig struct {
	*testing.T
	agent *nixl.Agent
	mem   []byte
	child *exec.Cmd
	in    *os.File
	out   *bufio.Reader
	at    []uint64 // its regions
}

func newRig(t *testing.T) *rig {
	testenv.Need(t, testenv.NIXL)
	if os.Getenv(transports) == "" {
		testenv.Need(t, testenv.OthersMemory)
	}
	l, err := nixl.Open(path())
	testenv.OK(t, err)
	r := &rig{T: t, mem: mapped(lent)}
	r.agent, err = l.Agent("borrower", 2)
	testenv.OK(t, err)
	testenv.OK(t, r.agent.Register(r.mem))
	r.child = exec.Command(os.Args[0])
	r.child.Env = append(os.Environ(), lenderEnv+"="+path())
	r.child.Stderr = os.Stderr
	out, err := r.child.StdoutPipe()
	testenv.OK(t, err)
	r.out = bufio.NewReader(out)
	in, write, err := os.Pipe()
	testenv.OK(t, err)
	r.child.Stdin, r.in = in, write
	testenv.OK(t, r.child.Start())
	testenv.OK(t, in.Close())
	t.Cleanup(func() {
		_, _ = r.child.Process.Signal(unix.SIGCONT), r.in.Close() // it may be killed
		_ = r.child.Wait()
		testenv.NoError(t, errors.Join(r.agent.Unregister(r.mem), r.agent.Close(), unix.Munmap(r.mem)))
	})
	r.learn()
	return r
}

// learn takes in the metadata of the lender's next region.
func (r *rig) learn() {
	r.Helper()
	at, metadata, err := parse(r.out)
	testenv.OK(r, err)
	testenv.OK(r, r.agent.Load("lender", metadata))
	r.at = append(r.at, at)
}

func (r *rig) poison() {
	copy(r.mem, bytes.Repeat([]byte{poison}, len(r.mem)))
}

// await waits for the end of a read.
func (r *rig) await(read *nixl.Read) error {
	r.Helper()
	var err error
	testenv.Until(r, "the end of a read", func() (done bool) {
		done, err = read.Done()
		return done
	})
	return err
}

// TestRead: what is read are the bytes that the lender has, in parts and at any offset, and nothing around the destination is touched.
func TestRead(t *testing.T) {
	r := newRig(t)
	want := content(0)
	random := rand.New(rand.NewPCG(1, 2))
	for range 24 {
		r.poison()
		lo := random.IntN(lent - 1)
		dst := r.mem[lo : lo+1+random.IntN(lent-lo)]
		var parts []nixl.Part
		var right []byte
		for left := len(dst); left > 0; {
			n := 1 + random.IntN(left)
			from := random.IntN(lent - n + 1)
			parts = append(parts, nixl.Part{Address: r.at[0] + uint64(from), Bytes: int64(n)})
			right, left = append(right, want[from:from+n]...), left-n
		}
		read, err := r.agent.Read(dst, "lender", parts)
		testenv.OK(t, err)
		testenv.OK(t, r.await(read))
		if !bytes.Equal(dst, right) {
			t.Fatalf("%d parts of %d bytes differ from what the lender has", len(parts), len(dst))
		}
		if !poisoned(r.mem[:lo]) || !poisoned(r.mem[lo+len(dst):]) {
			t.Fatalf("a read of %d bytes at %d wrote around them", len(dst), lo)
		}
	}
}

// TestMoreMemory: what the lender registers later is read once its new metadata is known, and not before.
func TestMoreMemory(t *testing.T) {
	r := newRig(t)
	for n := byte(1); n < 4; n++ {
		_, err := r.in.WriteString("\n")
		testenv.OK(t, err)
		r.learn()
		for region := range n + 1 {
			r.poison()
			read, err := r.agent.Read(r.mem, "lender", []nixl.Part{{Address: r.at[region], Bytes: lent}})
			testenv.OK(t, err)
			if err := r.await(read); err != nil || !bytes.Equal(r.mem, content(region)) {
				t.Fatalf("region %d of %d: %v, want its bytes", region, n+1, err)
			}
		}
	}
}

// TestNoRegularFile: what is opened at the start is a file that ends, and no FIFO that waits for another process.
func TestNoRegularFile(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, "libnixl_capi.so"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, filepath.Join(dir, "libnixl_capi.so"), "/dev/zero"} {
		if _, err := nixl.Open(path); !errors.Is(err, nixl.ErrNoLibrary) || !strings.Contains(err.Error(), "is no regular file") {
			t.Errorf("%s: got %v, want %v, and that it is no regular file", path, err, nixl.ErrNoLibrary)
		}
	}
}

// TestRefusals: what cannot be right is refused before it begins, and says why.
func TestRefusals(t *testing.T) {
	r := newRig(t)
	r.poison()
	outside := mapped(1 << 20)
	good := []nixl.Part{{Address: r.at[0], Bytes: 1 << 20}}
	for name, c := range map[string]struct {
		dst   []byte
		from  string
		parts []nixl.Part
		want  error // nil: an Error of the library
	}{
		"to memory that is not registered":   {outside, "lender", good, nixl.ErrUnregistered},
		"to more than is registered":         {r.mem[:lent:lent], "lender", []nixl.Part{{Address: r.at[0], Bytes: lent + 1}}, nixl.ErrLength},
		"too few bytes":                      {r.mem[:2<<20], "lender", good, nixl.ErrLength},
		"too many bytes":                     {r.mem[:1<<19], "lender", good, nixl.ErrLength},
		"negative bytes":                     {r.mem[:1<<20], "lender", []nixl.Part{{Address: r.at[0], Bytes: 2 << 20}, {Address: r.at[0], Bytes: -1 << 20}}, nixl.ErrLength},
		"nothing":                            {nil, "lender", nil, nixl.ErrLength},
		"from an agent that is not known":    {r.mem[:1<<20], "stranger", good, nil},
		"from before what it has registered": {r.mem[:1<<20], "lender", []nixl.Part{{Address: r.at[0] - 1, Bytes: 1 << 20}}, nil},
		"from beyond it":                     {r.mem[:1<<20], "lender", []nixl.Part{{Address: r.at[0] + lent - 1<<20 + 1, Bytes: 1 << 20}}, nil},
		"from nowhere":                       {r.mem[:1<<20], "lender", []nixl.Part{{Address: 0, Bytes: 1 << 20}}, nil},
	} {
		read, err := r.agent.Read(c.dst, c.from, c.parts)
		var status *nixl.Error
		if read != nil || err == nil || c.want != nil && !errors.Is(err, c.want) || c.want == nil && !errors.As(err, &status) {
			t.Errorf("a read %s: %v, want it refused (%v)", name, err, c.want)
		}
	}
	if !poisoned(r.mem) {
		t.Error("a read that was refused has written")
	}
	for name, metadata := range map[string][]byte{"none": nil, "garbage": []byte("garbage"), "zeros": make([]byte, 512)} {
		if err := r.agent.Load("other", metadata); !errors.Is(err, nixl.ErrMetadata) {
			t.Errorf("metadata that is %s: %v, want %v", name, err, nixl.ErrMetadata)
		}
	}
	own, err := r.agent.Metadata()
	testenv.OK(t, err)
	if err := r.agent.Load("borrower", own); !errors.Is(err, nixl.ErrMetadata) {
		t.Errorf("the agent's own metadata: %v, want %v", err, nixl.ErrMetadata)
	}
	testenv.OK(t, r.agent.Forget("lender"))
	if _, err := r.agent.Read(r.mem[:1<<20], "lender", good); err == nil {
		t.Error("a read from an agent that was forgotten has begun")
	}
}

// begin begins reads of all memory, in eight parts.
func (r *rig) begin() (list []*nixl.Read) {
	r.Helper()
	const n = lent / 8
	for i := range 8 {
		read, err := r.agent.Read(r.mem[i*n:(i+1)*n], "lender", []nixl.Part{{Address: r.at[0] + uint64(i*n), Bytes: n}})
		testenv.OK(r, err)
		list = append(list, read)
	}
	return list
}

// warm makes the connection.
func (r *rig) warm() {
	r.Helper()
	for _, read := range r.begin() {
		testenv.OK(r, r.await(read))
	}
}

// TestStoppedPeer: a read from a process that is stopped ends when that goes on, and not before it has all bytes; what was given up is
// written then. (Memory of the same machine may be read from a stopped process at once.)
func TestStoppedPeer(t *testing.T) {
	r := newRig(t)
	r.warm()
	r.poison()
	testenv.OK(t, r.child.Process.Signal(unix.SIGSTOP))
	_, err := unix.Wait4(r.child.Process.Pid, nil, unix.WUNTRACED, nil) // all of its threads stand
	testenv.OK(t, err)
	list := r.begin()
	if os.Getenv(transports) == "" { // memory of the same machine: this process reads it
		for _, read := range list {
			testenv.OK(t, r.await(read))
		}
	} else {
		time.Sleep(100 * time.Millisecond) // broken code has ended one by then
		for _, read := range list {
			if done, err := read.Done(); done || err != nil {
				t.Errorf("a read from a stopped process has ended, %v; want that it waits", err)
			}
		}
	}
	testenv.OK(t, r.child.Process.Signal(unix.SIGCONT))
	if os.Getenv(transports) != "" {
		for _, read := range list {
			testenv.OK(t, r.await(read))
		}
	}
	if !bytes.Equal(r.mem, content(0)) {
		t.Error("other bytes than the lender has")
	}
}

// TestDeadPeer: reads from a process that is killed end, with an error or with the right bytes, and write nothing afterwards; new ones
// are refused, or end with an error.
func TestDeadPeer(t *testing.T) {
	r := newRig(t)
	r.warm()
	r.poison()
	testenv.OK(t, r.child.Process.Signal(unix.SIGSTOP)) // what goes through it does not end
	list := r.begin()
	testenv.OK(t, r.child.Process.Kill())
	_ = r.child.Wait()
	right := content(0)
	const n = lent / 8
	for i, read := range list {
		if err := r.await(read); err == nil && !bytes.Equal(r.mem[i*n:(i+1)*n], right[i*n:(i+1)*n]) {
			t.Errorf("read %d has ended without an error, and has other bytes", i)
		}
	}
	r.poison()
	for range 3 {
		read, err := r.agent.Read(r.mem[:n], "lender", []nixl.Part{{Address: r.at[0], Bytes: n}})
		if err == nil {
			err = r.await(read)
		}
		if err == nil {
			t.Error("a read from a process that is dead has ended without an error")
		}
	}
	time.Sleep(300 * time.Millisecond) // broken code would have written by then
	if !poisoned(r.mem) {
		t.Error("bytes came after all reads had ended")
	}
}

// TestCloseEndsReads: a closed agent writes to no destination any more, whatever its peer does then.
func TestCloseEndsReads(t *testing.T) {
	r := newRig(t)
	r.warm()
	testenv.OK(t, r.child.Process.Signal(unix.SIGSTOP))
	list := r.begin()
	testenv.OK(t, r.agent.Close())
	r.poison()
	for _, read := range list {
		if done, err := read.Done(); !done || err != nil && !errors.Is(err, nixl.ErrClosed) {
			t.Errorf("a read of a closed agent: %v, %v, want it ended", done, err)
		}
	}
	testenv.OK(t, r.child.Process.Signal(unix.SIGCONT))
	time.Sleep(300 * time.Millisecond) // broken code would have written by then
	if !poisoned(r.mem) {
		t.Error("bytes came after the agent was closed")
	}
	if err := r.agent.Register(mapped(1 << 20)); !errors.Is(err, nixl.ErrClosed) {
		t.Errorf("a registration with a closed agent: %v, want %v", err, nixl.ErrClosed)
	}
}

// TestDyingPeers: a process that is killed while it reads, or is read from, costs the other nothing but these reads.
func TestDyingPeers(t *testing.T) {
	r := newRig(t)
	own := mapped(lent)
	fill(own, 0)
	testenv.OK(t, r.agent.Register(own))
	metadata, err := r.agent.Metadata()
	testenv.OK(t, err)
	random := rand.New(rand.NewPCG(3, 4))
	for n := range 12 {
		c := exec.Command(os.Args[0])
		c.Stderr = os.Stderr
		role := lenderEnv
		if n%2 == 0 {
			role = borrowerEnv
			c.Stdin = strings.NewReader(describe(own, metadata))
		} else {
			in, err := c.StdinPipe() // open as long as it is to live
			testenv.OK(t, err)
			defer in.Close()
		}
		c.Env = append(os.Environ(), role+"="+path(), manyEnv+"=1")
		out, err := c.StdoutPipe()
		testenv.OK(t, err)
		testenv.OK(t, c.Start())
		name := fmt.Sprint("lender", c.Process.Pid)
		wait := time.Duration(random.IntN(20_000)) * time.Microsecond
		if n%2 == 0 {
			if _, err := bufio.NewReader(out).ReadString('\n'); err != nil { // it reads
				t.Fatal(err)
			}
			time.Sleep(wait)
			testenv.OK(t, c.Process.Kill())
		} else {
			at, metadata, err := parse(bufio.NewReader(out))
			testenv.OK(t, err)
			testenv.OK(t, r.agent.Load(name, metadata))
			time.AfterFunc(wait, func() { _ = c.Process.Kill() })
			for { // it dies soon
				read, err := r.agent.Read(r.mem, name, []nixl.Part{{Address: at, Bytes: lent}})
				if err == nil {
					err = r.await(read)
				}
				if err != nil {
					break
				}
			}
			_ = r.agent.Forget(name) // NIXL may have forgotten it by itself
		}
		_ = c.Wait()
		read, err := r.agent.Read(r.mem, "lender", []nixl.Part{{Address: r.at[0], Bytes: lent}})
		testenv.OK(t, err)
		r.poison()
		if err := r.await(read); err != nil {
			t.Fatalf("after %d others have died: %v", n+1, err)
		}
	}
}

// TestOverTCP is all of that without what reads the memory of another process at once.
func TestOverTCP(t *testing.T) {
	testenv.Need(t, testenv.NIXL)
	if os.Getenv(transports) != "" {
		return
	}
	c := exec.Command(os.Args[0], "-test.run", "^Test(Read|MoreMemory|Refusals|StoppedPeer|DeadPeer|CloseEndsReads)$", "-test.v")
	c.Env = append(os.Environ(), transports+"=tcp,self", "UCX_PROTO_EMULATION_ENABLE=y")
	out, err := c.CombinedOutput()
	if passed := strings.Count(string(out), "--- PASS"); err != nil || passed != 6 {
		t.Errorf("%d tests passed over TCP, %v, want 6:\n%s", passed, err, out)
	}
}

// TestNothingOverTCP: where UCX would have to ask the other side for bytes a read fails.
func TestNothingOverTCP(t *testing.T) {
	testenv.Need(t, testenv.NIXL)
	const mark = "it has failed"
	if os.Getenv(transports) != "" {
		r := newRig(t)
		var status *nixl.Error
		read, err := r.agent.Read(r.mem, "lender", []nixl.Part{{Address: r.at[0], Bytes: lent}})
		testenv.OK(t, err)
		if errors.As(r.await(read), &status) {
			fmt.Println(mark)
		}
		return
	}
	c := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	c.Env = append(os.Environ(), transports+"=tcp,self")
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), mark) {
		t.Errorf("%v, want a read over TCP refused:\n%s", err, out)
	}
}

// TestTransports: a machine has TCP at least.
func TestTransports(t *testing.T) {
	testenv.Need(t, testenv.NIXL)
	l, err := nixl.Open(path())
	testenv.OK(t, err)
	if list, err := l.Transports(); err != nil || !slices.Contains(list, "tcp") || !slices.IsSorted(list) {
		t.Errorf("transports %q, %v, want tcp among them", list, err)
	}
	if v := l.Version(); !strings.HasPrefix(v, "1.") {
		t.Errorf("version %q, want that of the wheel", v)
	}
}

// TestSignalsAreGos: UCX takes no signal that Go's runtime or the host has use for.
func TestSignalsAreGos(t *testing.T) {
	newRig(t)
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGHUP)
	defer signal.Stop(got)
	testenv.OK(t, unix.Kill(os.Getpid(), unix.SIGHUP))
	testenv.Receive(t, "SIGHUP", got)
	defer func() {
		if recover() == nil {
			t.Error("an access to no memory is no panic")
		}
	}()
	var nothing *int
	*nothing = 1
}

// TestNoLibrary: what is missing, or is another library, is named with the way to get it.
func TestNoLibrary(t *testing.T) {
	if _, err := nixl.Open(t.TempDir()); !errors.Is(err, nixl.ErrNoLibrary) || !strings.Contains(err.Error(), "pip install") {
		t.Errorf("%v, want %v and what to do", err, nixl.ErrNoLibrary)
	}
	if _, err := nixl.Open("libc.so.6"); !errors.Is(err, nixl.ErrSymbol) {
		t.Errorf("%v for another library, want %v", err, nixl.ErrSymbol)
	}
}
