package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/kv"
)

// TestSharedRoot runs two hosts on one directory, clients on both, and kills the one that evicts.
func TestSharedRoot(t *testing.T) {
	t.Parallel() // it waits more than it works
	dir := testenv.Dir(t)
	const capacity = 24 << 20
	conf := func(id string) []string {
		text := fmt.Sprintf(`socket = %q
[http]
listen = %q
[store]
host_id = %q
shared_poll = "50ms"
shared_lapse = "5s"
[[root]]
path = %q
capacity = %d
shared = true
`, filepath.Join(dir, id), anyPort, id, filepath.Join(dir, "kv"), capacity)
		return []string{"--config", write(t, dir, id+".toml", text), "--log-format", "json"}
	}
	type figures struct {
		Hits, Accesses  int
		MismatchedBytes int `json:"mismatched_bytes"`
	}
	play := func(id, limit string) (f figures) {
		t.Helper()
		r := finish(t, command(t, dir, "replay", "--socket", filepath.Join(dir, id), "--trace", simTrace(t), "--limit",
			limit, "--json"))
		if r.code != exitOK {
			t.Fatalf("replay on %s: exit %d: %s", id, r.code, r.stderr)
		}
		if err := json.Unmarshal([]byte(r.stdout), &f); err != nil {
			t.Fatalf("report of the replay: %v: %s", err, r.stdout)
		}
		return f
	}
	_, logA, stopA := startHost(t, dir, conf("a")...)
	_, logB, stopB := startHost(t, dir, conf("b")...)
	if !strings.Contains(logA(), "elected evictor of the shared root") ||
		strings.Contains(logB(), "elected evictor of the shared root") {
		t.Fatalf("the first host is not the evictor:\n%s\n%s", logA(), logB())
	}
	const some = "12" // requests whose chunks all fit, beside the credit that both hosts may hold
	first := play("a", some)
	entries := func(logged func() string) int64 { return gauge(t, httpAddress(t, logged), "kvhost_root_entries") }
	until(t, "entries of one host at the other", func() bool { n := entries(logA); return n > 0 && entries(logB) == n })
	second := play("b", some)
	if second.Hits <= first.Hits {
		t.Errorf("b hits %d of %d chunks that a stored, a itself %d", second.Hits, second.Accesses, first.Hits)
	}
	within := func(when string) {
		t.Helper()
		if n := taken(t, filepath.Join(dir, "kv")); n > capacity {
			t.Errorf("%s: %d bytes on disk, the capacity is %d", when, n, capacity)
		}
	}
	within("both run")
	stopA(syscall.SIGKILL)
	await(t, logB, "elected evictor of the shared root", nil)
	third := play("b", "300")
	within("one was killed")
	if third.MismatchedBytes+second.MismatchedBytes+first.MismatchedBytes != 0 {
		t.Error("wrong bytes")
	}
	_, _, stopA = startHost(t, dir, conf("a")...)
	if again := play("a", "300"); again.Hits == 0 {
		t.Error("the host that came back finds nothing")
	}
	within("it is back")
	if a, b := stopA(syscall.SIGTERM), stopB(syscall.SIGTERM); a != exitOK || b != exitOK {
		t.Errorf("exit %d and %d", a, b)
	}
	if r := finish(t, command(t, dir, "fsck", filepath.Join(dir, "kv"))); r.code != exitOK {
		t.Errorf("fsck: exit %d: %s", r.code, r.stdout)
	}
}

// taken is the bytes on disk of a root's pieces, temporaries and trash, each file once.
func taken(t *testing.T, root string) (n int64) {
	t.Helper()
	seen := map[uint64]bool{}
	err := filepath.WalkDir(root, func(name string, e os.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil
		}
		if err != nil || e.IsDir() || strings.Contains(name, ".kvhost") && !strings.Contains(name, "/t/") &&
			!strings.Contains(name, "/trash/") {
			return err
		}
		var st syscall.Stat_t
		if syscall.Lstat(name, &st) == nil && !seen[st.Ino] && e.Type()&fs.ModeSymlink == 0 {
			seen[st.Ino] = true
			n += st.Blocks * 512
		}
		return nil
	})
	testenv.OK(t, err)
	return n
}

var (
	bucketPoll  = flag.Duration("bucket.poll", 200*time.Millisecond, "shared_poll of the hosts of TestSharedBucket")
	bucketLapse = flag.Duration("bucket.lapse", 4*time.Second, "shared_lapse likewise")
	bucketIdle  = flag.Duration("bucket.idle", 0, "count the requests of idle hosts for so long")
)

const (
	bucketChunk    = 256 << 10
	bucketCapacity = 64 * (bucketChunk + 16<<10)
	bucketKeys     = 200
	bucketClients  = 2 // of each host, with one store or load at a time
)

// bucketHost is one of the hosts of a bucket, which comes and goes.
type bucketHost struct {
	id, socket string
	start      func() // again
	pid        int
	logged     func() string
	kill       func()
}

func bucketKey(n uint64) (k kv.Key) {
	k[0], k[1], k[31] = byte(n), byte(n>>8), 7
	return k
}

// fill writes what chunk n holds.
func fill(page []byte, n uint64) {
	random := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)})
	_, _ = random.Read(page)
}

// TestSharedBucket runs three hosts on one bucket of a real server, with clients that store, and load into poisoned memory. One host is killed, and the
// evictor is stopped for longer than its term and goes on. Nothing wrong is loaded, a term has one evictor, and the bucket never has more
// than the capacity and what the clients of the host that was stopped had under way.
func TestSharedBucket(t *testing.T) {
	url := s3double.StartReal(t)
	dir := shortDir(t)
	hosts := map[string]*bucketHost{}
	for _, id := range []string{"a", "b", "c"} {
		hosts[id] = newBucketHost(t, dir, id, url)
		hosts[id].start()
	}
	ctx, stop := context.WithCancel(t.Context())
	var work sync.WaitGroup
	defer work.Wait()
	defer stop()
	var loads, stores, wrong, fails atomic.Int64
	for i, h := range []*bucketHost{hosts["a"], hosts["b"], hosts["c"]} {
		for j := range bucketClients {
			work.Go(func() {
				g := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				for ctx.Err() == nil {
					if err := storeAndLoad(ctx, h.socket, g, &loads, &stores, &fails); errors.Is(err, errWrongBytes) {
						wrong.Add(1)
						t.Error(err)
					}
					time.Sleep(50 * time.Millisecond) // the host is gone
				}
			})
		}
	}
	w := watchBucket(t, url)
	work.Go(func() { w.run(ctx) })
	more := func(of int64) {
		t.Helper()
		begun := stores.Load()
		until(t, fmt.Sprintf("%d stores more", of), func() bool { return t.Failed() || stores.Load() >= begun+of }, func() any {
			return fmt.Sprintf("%d stores, %d loads, %d of them failed", stores.Load()-begun, loads.Load(), fails.Load())
		})
		if t.Failed() {
			t.FailNow()
		}
	}
	more(300)
	t.Logf("times from a store to a hit at another host: %v", hitTimes(t, hosts["a"].socket, hosts["c"].socket))
	hosts["b"].kill()
	more(100)
	first := w.evictor()
	stopped := hosts[first[:1]]
	t.Logf("%s is the evictor, and is stopped", first)
	testenv.OK(t, syscall.Kill(stopped.pid, syscall.SIGSTOP))
	until(t, "other evictor", func() bool { e := w.evictor(); return e != "" && e[0] != first[0] })
	hosts["b"].start()
	more(200)
	testenv.OK(t, syscall.Kill(stopped.pid, syscall.SIGCONT))
	more(300)
	until(t, "return of the host that was stopped", func() bool {
		return strings.Contains(stopped.logged(), "host given up by the others; joining again")
	})
	until(t, "hits of all hosts", func() bool {
		for _, h := range hosts {
			if gauge(t, httpAddress(t, h.logged), "kvhost_root_shared_state") != 2 {
				return false
			}
		}
		return true
	})
	more(100)
	stop()
	work.Wait()
	t.Logf("%d stores, %d loads, %d loads that failed, %d looks at the bucket: at most %d bytes of %d", stores.Load(), loads.Load(), fails.Load(),
		w.looks, w.most, bucketCapacity)
	if most := int64(bucketCapacity + bucketClients*(bucketChunk+16<<10)); w.most > most || w.most < bucketCapacity/2 {
		t.Errorf("%d bytes in the bucket at most, want at most %d, and half of the capacity", w.most, most)
	}
	if loads.Load() == 0 || wrong.Load() > 0 {
		t.Errorf("%d loads, %d of them wrong", loads.Load(), wrong.Load())
	}
	if *bucketIdle > 0 {
		for _, h := range hosts {
			at := httpAddress(t, h.logged)
			before := gauge(t, at, "kvhost_bucket_requests_total")
			time.Sleep(*bucketIdle)
			n := gauge(t, at, "kvhost_bucket_requests_total") - before
			t.Logf("%s: %d requests in %s at idle, %d a day", h.id, n, *bucketIdle, n*int64(24*time.Hour / *bucketIdle))
		}
	}
}

func newBucketHost(t *testing.T, dir, id, url string) *bucketHost {
	h := &bucketHost{id: id, socket: filepath.Join(dir, id)}
	file := write(t, dir, id+".toml", fmt.Sprintf(`socket = %q
[http]
listen = %q
[store]
host_id = %q
shared_poll = %q
shared_lapse = %q
[[root]]
path = "s3://bucket/kv"
endpoint = %q
path_style = true
capacity = %d
shared = true
`, h.socket, anyPort, id, *bucketPoll, *bucketLapse, url, bucketCapacity))
	h.start = func() {
		cmd := command(t, dir, "--config", file, "--log-format", "json")
		cmd.Env = append(cmd.Environ(), "AWS_ACCESS_KEY_ID=key", "AWS_SECRET_ACCESS_KEY=secret")
		cmd, logged, stop := startCommand(t, cmd)
		h.pid, h.logged, h.kill = cmd.Process.Pid, logged, func() { stop(syscall.SIGKILL) }
	}
	return h
}

var errWrongBytes = errors.New("other bytes than were stored")

// storeAndLoad has a session store and load until the context or the host ends.
func storeAndLoad(ctx context.Context, socket string, g *rand.Rand, loads, stores, fails *atomic.Int64) error {
	s, err := client.Dial(ctx, hosttest.Hello(socket, kv.Uniform(1, 1, 1, bucketChunk)))
	if err != nil {
		return err
	}
	defer s.Close()
	arena, err := s.NewArena(2 * bucketChunk)
	if err != nil {
		return err
	}
	if _, err := s.Register(ctx, 0, arena, []client.PlaneRegion{{Stride: bucketChunk, Blocks: 2}}); err != nil {
		return err
	}
	from, to, want := arena.Bytes()[:bucketChunk], arena.Bytes()[bucketChunk:], make([]byte, bucketChunk)
	for ctx.Err() == nil {
		n := g.Uint64N(bucketKeys)
		l, err := s.Lookup(ctx, client.LookupRequest{Request: 1, Keys: []kv.Key{bucketKey(n)}})
		if err != nil {
			return err
		}
		if l.Hits() == 0 {
			_ = l.Release(ctx)
			fill(from, n)
			job, err := s.Store(ctx, 1, 0, []client.StoreChunk{{Key: bucketKey(n), Blocks: []uint32{0}}})
			if err != nil {
				return err
			}
			if r, err := job.Published(ctx); err != nil {
				return err
			} else if r.Chunks[0].Result == client.Stored {
				stores.Add(1)
			} else {
				time.Sleep(10 * time.Millisecond)
			}
			continue
		}
		for i := range to {
			to[i] = 0xa5
		}
		job, err := s.Load(ctx, l, []client.LoadChunk{{Blocks: []uint32{1}}}, client.LoadOptions{})
		if err != nil {
			return err
		}
		r, err := job.Wait(ctx)
		if err != nil {
			return err
		}
		if fill(want, n); len(r.Failed) > 0 {
			fails.Add(1)
		} else if loads.Add(1); !bytes.Equal(want, to) {
			return fmt.Errorf("%w: chunk %d", errWrongBytes, n)
		}
	}
	return nil
}

// hitTimes are times from a store at one host to a hit at another one, sorted.
func hitTimes(t *testing.T, from, to string) (list []time.Duration) {
	t.Helper()
	g := kv.Uniform(1, 1, 1, bucketChunk)
	a, b := hosttest.Dial(t, hosttest.Hello(from, g), 1, 0, 0), hosttest.Dial(t, hosttest.Hello(to, g), 1, 0, 0)
	defer a.Close()
	defer b.Close()
	for n := uint64(bucketKeys); len(list) < 12; n++ {
		fill(a.Page(0, 0), n)
		if r := a.Put(client.StoreChunk{Key: bucketKey(n), Blocks: []uint32{0}}); r.Chunks[0].Result != client.Stored {
			continue // others are storing too
		}
		begun := time.Now()
		until(t, "hit at the other host", func() bool {
			l := b.Find(bucketKey(n))
			defer l.Release(t.Context())
			return l.Hits() == 1
		})
		list = append(list, time.Since(begun).Round(time.Millisecond))
	}
	slices.Sort(list)
	return list
}

// bucketWatch looks at a bucket as its server has it.
type bucketWatch struct {
	t       *testing.T
	fs      *s3fs.FS
	control *s3fs.Control

	mu     sync.Mutex
	owner  string
	owners map[string]string // by term
	most   int64
	looks  int
}

func watchBucket(t *testing.T, url string) *bucketWatch {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	fsys, err := s3fs.Open(s3fs.Config{Path: "s3://bucket/kv", Endpoint: url, PathStyle: true})
	testenv.OK(t, err)
	return &bucketWatch{t: t, fs: fsys, control: fsys.Control("s3://bucket/kv/.kvhost/shared", 10*time.Second), owners: map[string]string{}}
}

func (w *bucketWatch) run(ctx context.Context) {
	for ; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		var sum int64
		err := w.fs.List(ctx, "s3://bucket/kv", func(rel string, size int64, _ time.Time) {
			if !strings.HasPrefix(rel, ".kvhost") {
				sum += size
			}
		})
		b, _, gerr := w.control.Get("evictor", "", 1<<20)
		if err != nil || gerr != nil {
			continue
		}
		term, owner := field(b, `"term":`), strings.Trim(field(b, `"owner":`), `"`)
		w.mu.Lock()
		w.most, w.looks, w.owner = max(w.most, sum), w.looks+1, owner
		if was := w.owners[term]; was != "" && owner != "" && was != owner {
			w.t.Errorf("term %s is of %s and of %s", term, was, owner)
		} else if owner != "" {
			w.owners[term] = owner
		}
		w.mu.Unlock()
	}
}

// field is the text of a value in JSON.
func field(b []byte, name string) string {
	_, rest, _ := strings.Cut(string(b), name)
	value, _, _ := strings.Cut(rest, ",")
	return value
}

func (w *bucketWatch) evictor() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.owner
}
