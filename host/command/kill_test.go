package command

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/bits"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/kvhost/kvhost/host/kv"
)

const (
	killBlocks = 64
	killLayers = 8
	killPage   = 64 << 10
)

// killPeer is a session with pages and semaphores.
type killPeer struct {
	*hosttest.Client
	semaphores *client.Semaphores
}

func dialToKill(t *testing.T, socket string) *killPeer {
	t.Helper()
	const pages = killLayers * killBlocks * killPage
	p := &killPeer{Client: hosttest.Dial(t, hosttest.Hello(socket, kv.Uniform(16, killLayers, 1, killPage)), killBlocks, 0, 4096)}
	var err error
	p.semaphores, err = p.ShareSemaphores(t.Context(), p.Arena, pages, 64)
	testenv.OK(t, err)
	return p
}

func killKey(n int) (k kv.Key) {
	k[0], k[31] = byte(n), 1
	return k
}

func killIDs(i int) (ids []uint32) {
	for b := range 16 {
		ids = append(ids, uint32(16*i+b))
	}
	return ids
}

// outcome stores chunk n and returns its result.
func (p *killPeer) outcome(n int) client.ChunkResult {
	for i := range p.Arena.Bytes()[:killLayers*killBlocks*killPage] {
		p.Arena.Bytes()[i] = byte(i>>12 + n)
	}
	return p.Put(client.StoreChunk{Key: killKey(n), Blocks: killIDs(0)}).Chunks[0]
}

func (p *killPeer) mustStore(t *testing.T, n int) {
	t.Helper()
	if got := p.outcome(n); got.Result != client.Stored {
		t.Fatalf("the store of chunk %d %s: %v", n, got.Result, got.Err)
	}
}

// The host is killed while a store and a layer-wise load wait for semaphores. Waiters on their
// semaphores continue and find them failed, and both jobs end. After a restart the host serves what was stored.
func TestHostKilledUnderWaiters(t *testing.T) {
	dir := shortDir(t)
	// Of a small root, a store that waits gets too small a part for a chunk.
	args := []string{"--root", "kv=1GiB", "--socket", "s", "--http-listen", ""}
	_, _, stop := startHost(t, dir, args...)
	ctx := t.Context()
	p := dialToKill(t, filepath.Join(dir, "s"))
	p.mustStore(t, 0)
	held, err := p.Store(ctx, 0, 0, []client.StoreChunk{{Key: killKey(1), Blocks: killIDs(1)}},
		client.WithTimeline(&client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 1, DoneValue: 1, Status: 2}))
	testenv.OK(t, err)
	load, err := p.Load(ctx, p.Find(killKey(0)), []client.LoadChunk{{Blocks: killIDs(2)}}, client.LoadOptions{
		Layers:   func(uint32, []int) {},
		Timeline: &client.Timeline{Semaphores: p.semaphores, Wait: 0, WaitValue: 1, Done: 8, DoneValue: 100, Status: 16, Layers: killLayers},
	})
	testenv.OK(t, err)
	if err := p.Ping(ctx); err != nil { // the host has both jobs
		t.Fatal(err)
	}
	stop(syscall.SIGKILL)
	for semaphore, v := range map[int]uint64{1: 1, 8: 100} {
		testenv.OK(t, p.semaphores.Wait(ctx, semaphore, v))
	}
	for _, status := range []int{2, 16, 17} { // of the store, and of the load's layers
		if got := p.semaphores.Load(status); got != client.StatusFailed {
			t.Errorf("status semaphore %d after the host's death: got %d, want %d", status, got, client.StatusFailed)
		}
	}
	if _, err := load.Wait(ctx); !errors.Is(err, client.ErrHostGone) {
		t.Error(err)
	}
	if _, err := held.Published(ctx); !errors.Is(err, client.ErrHostGone) {
		t.Error(err)
	}

	startHost(t, dir, args...)
	dialToKill(t, filepath.Join(dir, "s")).loads(t, 0)
}

// loads loads chunk n into other blocks and compares it.
func (p *killPeer) loads(t *testing.T, n int) {
	t.Helper()
	l := p.Find(killKey(n))
	if l.Hits() != 1 || !p.load(t, l, n) {
		t.Fatalf("chunk %d was not loaded: %d hits", n, l.Hits())
	}
}

// load loads chunk n under its lease into other blocks, and compares it if it came.
func (p *killPeer) load(t *testing.T, l *client.Lookup, n int) bool {
	t.Helper()
	if r := p.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: killIDs(3)}); len(r.Failed) > 0 {
		return false
	}
	for plane := range killLayers {
		base := plane * killBlocks * killPage
		for at := range 16 * killPage {
			if got, want := p.Arena.Bytes()[base+48*killPage+at], byte((base+at)>>12+n); got != want {
				t.Fatalf("chunk %d, plane %d: byte %d is %d, want %d", n, plane, at, got, want)
			}
		}
	}
	return true
}

var (
	killRounds = flag.Int("kill.rounds", 6, "how often TestKillRounds kills a host")
	killSeed   = flag.Uint64("kill.seed", 0, "replay the kills of this seed; 0 takes a fresh one")
)

// TestKillRounds kills a real host with SIGKILL while engines store and load, after a random number of pieces, again
// and again on the same root, under another place policy each time: none, one that follows the key, one that names a piece
// otherwise at each call, or one that traps. No byte that is served is ever wrong; after each restart no temporary is left,
// and what the host says it holds is what the disk holds.
func TestKillRounds(t *testing.T) {
	t.Parallel() // it waits more than it works
	seed := testenv.Seed(t, "kill.seed", *killSeed)
	rng := rand.New(rand.NewPCG(seed, 9))
	dir := testenv.Dir(t)
	call, trap := filepath.Join(dir, "call.wasm"), filepath.Join(dir, "trap.wasm")
	for _, m := range wasmtest.Modules() {
		name := map[string]string{"places/a name for each call": call, "places/later faults now and then": trap}[m.String()]
		if name == "" {
			continue
		}
		testenv.OK(t, os.WriteFile(name, m.Wasm, 0o600))
	}
	tally := testenv.NewTally(t, "kills")
	tally.Add(0, 0, 1)
	var found int64 // at all starts: one kill may leave none, where puts in flight have evicted all that was there
	for round := range *killRounds {
		k := &kill{
			T: t, dir: dir, round: round, evict: pick(rng, "lru.wasm", "prefix.wasm", "reuse.wasm", "s3fifo.wasm"),
			place:      pick(rng, "", "llmd.wasm", call, trap),
			durability: pick(rng, "none", "strict"),
			after:      rng.Int64N(800), sessions: 1 + rng.IntN(3),
		}
		published, held := k.run()
		tally.Add(published, 1, 0)
		found += held
		if t.Failed() {
			t.Fatalf("round %d of seed %d: %+v", round, seed, *k)
		}
	}
	last := &kill{T: t, dir: dir, round: *killRounds, evict: "lru.wasm", durability: "none", sessions: 1}
	held, hits := last.served()
	if found += held; found == 0 || hits == 0 {
		t.Errorf("starts after kills found %d bytes, and the last host had %d hits: no round has tested anything", found, hits)
	}
	r := finish(t, command(t, dir, "fsck", "--quiet", "kvhost-data"))
	if r.code != exitOK && strings.Contains(r.stdout, "damaged") {
		t.Errorf("fsck after all: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
}

func pick(rng *rand.Rand, list ...string) string { return list[rng.IntN(len(list))] }

// kill is one round.
type kill struct {
	*testing.T
	dir               string
	round             int
	evict, durability string
	place             string // empty: the built-in one
	after             int64  // pieces that the host published before it is killed
	sessions          int
	more              []string // arguments
}

// start starts a host, which finds everything that the last one left, and returns how much that is.
func (k *kill) start() (address string, held int64, stop func(os.Signal) int) {
	args := append([]string{
		"--http-listen", anyPort, "--root", "kvhost-data=3MiB", "--store-durability", k.durability,
	}, k.more...)
	for _, policy := range []string{k.evict, k.place} {
		if policy != "" {
			args = append(args, "--policy", policy)
		}
	}
	_, logged, end := startHost(k.T, k.dir, args...)
	address = httpAddress(k.T, logged)
	held = k.recovered(address, logged)
	return address, held, end
}

// served is a round without a kill. It returns the bytes that the host found, and the hits of a replay.
func (k *kill) served() (held, hits int64) {
	address, held, stop := k.start()
	r := finish(k.T, k.replay())
	if r.code != exitOK {
		k.Errorf("replay after all: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	hits = gauge(k.T, address, "kvhost_lookup_hits_total")
	stop(syscall.SIGTERM)
	return held, hits
}

// run is one round. It returns how many pieces the host had published when it was killed, and the bytes that it found.
func (k *kill) run() (published, held int64) {
	address, held, stop := k.start()
	replay := k.replay()
	var out strings.Builder
	replay.Stdout, replay.Stderr = &out, &out
	testenv.OK(k, replay.Start())
	var err error
	ended := make(chan struct{})
	go func() { defer close(ended); err = replay.Wait() }()
	published = k.awaitPieces(address, ended)
	stop(syscall.SIGKILL)
	<-ended
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		k.Fatal(err)
	}
	if code := replay.ProcessState.ExitCode(); code == exitMismatch || strings.Contains(out.String(), "goroutine ") {
		k.Errorf("replay under the kill: exit code %d\n%s", code, out.String())
	}
	return published, held
}

// awaitPieces waits until the host has published as many pieces as the round says, or the replay has ended.
func (k *kill) awaitPieces(address string, ended <-chan struct{}) (published int64) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for published = gauge(k.T, address, storedFiles); published < k.after; published = gauge(k.T, address, storedFiles) {
		select {
		case <-ended:
			return published
		case <-tick.C:
		}
	}
	return published
}

const storedFiles = "kvhost_stored_files_total"

// replay replays the same requests each time, so that they ask for what earlier rounds left.
func (k *kill) replay() *exec.Cmd {
	return command(k.T, k.dir, "replay", "--trace", absolute(k.T, mixedTrace), "--limit", "400", "--chunk-bytes",
		"16384",
		"--ranks", "2", "--sessions", fmt.Sprint(k.sessions), "--json")
}

// recovered waits until a host has found everything that the last one left, and compares its account with the disk.
func (k *kill) recovered(address string, logged func() string) int64 {
	root := filepath.Join(k.dir, "kvhost-data")
	var said, held int64
	var temporaries []string
	testenv.Until(k, "the bytes that the disk has", func() bool {
		said = gauge(k.T, address, "kvhost_root_used_bytes")
		held, temporaries = k.disk(root)
		return said == held && len(temporaries) == 0
	}, func() any {
		return fmt.Sprintf("round %d: the host says it holds %d bytes, the disk holds %d; temporaries: %v\n%s", k.round,
			said, held, temporaries, logged())
	})
	return held
}

// headerOf reads the header of a piece.
func headerOf(name string) (h pieceformat.Header, ok bool) {
	b, err := os.ReadFile(name)
	if err == nil {
		h, err = pieceformat.DecodeHeader(b)
	}
	return h, err == nil
}

// disk adds up the blocks of pieces and quarantine. An entry reserves the bytes of the pieces that it lacks.
func (k *kill) disk(root string) (held int64, temporaries []string) {
	lacking := map[kv.Key]int64{}
	err := filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a temporary that is just being swept
		}
		if err != nil || e.IsDir() {
			return err
		}
		if strings.HasSuffix(name, ".tmp") {
			temporaries = append(temporaries, name)
		}
		rel, err := filepath.Rel(root, name)
		own := strings.HasPrefix(rel, ".kvhost/") || strings.HasPrefix(rel, ".kvhost-copy/")
		if err != nil || own && !strings.HasPrefix(rel, ".kvhost/quarantine/") {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Stat(name, &st); err == nil {
			size := (st.Blocks*512 + 4095) &^ 4095
			held += size
			if h, ok := headerOf(name); ok && !own {
				if _, more := lacking[h.Key]; !more {
					lacking[h.Key] = size * int64(bits.OnesCount64(h.Pieces))
				}
				lacking[h.Key] -= size
			}
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		k.Fatal(err)
	}
	for _, size := range lacking {
		held += size
	}
	return held, temporaries
}

// gauge is the sum of a metric's series.
func gauge(t *testing.T, address, name string) int64 {
	t.Helper()
	r, err := http.Get("http://" + address + "/metrics")
	testenv.OK(t, err)
	defer r.Body.Close()
	sum, series := 0.0, 0
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		rest, ok := strings.CutPrefix(lines.Text(), name)
		if !ok || !strings.HasPrefix(rest, " ") && !strings.HasPrefix(rest, "{") {
			continue
		}
		v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			t.Fatalf("metric %s: %v", name, err)
		}
		sum, series = sum+v, series+1
	}
	if series == 0 {
		t.Fatalf("no metric %s", name)
	}
	return int64(sum)
}
