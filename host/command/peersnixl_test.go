package command

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/nixl"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/peerdouble"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// TestPeerDiesInARead loads again and again from the memory of a host of another process, by NIXL, and kills or stops that on the way.
// Every load ends, each block is right or named as failed, and what this host has itself is loaded all the while. A host that was only
// stopped lends again when it goes on. Over TCP a READ from a host that is stopped does not end: what it has is kept from others.
func TestPeerDiesInARead(t *testing.T) {
	testenv.Need(t, testenv.NIXL, testenv.OthersMemory)
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		for name, way := range map[string][]string{"memory": nil, "TCP": {"UCX_TLS=tcp,self", "UCX_PROTO_EMULATION_ENABLE=y"}} {
			t.Run(fmt.Sprint(name, " ", signal), func(t *testing.T) {
				t.Parallel() // it waits more than it works
				peerDiesInARead(t, signal, way)
			})
		}
	}
}

// startNIXL starts a host with NIXL, a root, by default a directory, and more of [peers].
func startNIXL(t *testing.T, environment []string, root, more string) (logged func() string, _ *os.Process, _ *killPeer) {
	dir := shortDir(t)
	if root == "" {
		root = filepath.Join(dir, "kv")
	}
	conf := write(t, dir, "k.toml", fmt.Sprintf("socket = %q\n[http]\nlisten = %q\n[store]\nmemory = 0\n[move]\nbandwidth = 1\n[[root]]\npath = %q\ncapacity = \"256MiB\"\n[peers]\nnixl = %q\n%s\n",
		filepath.Join(dir, "s"), anyPort, root, filepath.Join(testenv.Root(), ".build", "nixl"), more))
	cmd := command(t, dir, "--config", conf, "--log-format", "json")
	cmd.Env = append(slices.Clone(cmd.Environ()), environment...)
	_, logged, _ = startCommand(t, cmd)
	return logged, cmd.Process, dialToKill(t, filepath.Join(dir, "s"))
}

// freeAddress is one of loopback.
func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	defer l.Close()
	return l.Addr().String()
}

func peerDiesInARead(t *testing.T, signal syscall.Signal, environment []string) {
	const chunks = killBlocks/16 - 1 // and one that this host has itself
	at := freeAddress(t)
	_, lender, a := startNIXL(t, environment, "memory:", fmt.Sprintf("listen = %q\nbandwidth = 0", at))
	for n := range chunks {
		a.putOwn(n)
	}
	logB, _, b := startNIXL(t, environment, "", fmt.Sprintf("hosts = %q", at))
	b.putOwn(chunks)
	awaitPeerGauge(t, logB, "kvhost_peer_entries", chunks, chunks)
	awaitPeerGauge(t, logB, "kvhost_peer_nixl", 1, 1)
	var keys []kv.Key
	var wanted []client.LoadChunk
	for n := range chunks {
		keys, wanted = append(keys, killKey(n)), append(wanted, client.LoadChunk{Index: n, Blocks: killIDs(n)})
	}
	// load loads what is a hit, and says how many chunks of the peer have come.
	load := func() (whole int) {
		t.Helper()
		b.Poison()
		l := b.Find(keys...)
		if hits := l.Hits(); hits > 0 {
			r := b.Get(l, client.LoadOptions{}, wanted[:hits]...)
			for n := range hits {
				failed := slices.ContainsFunc(r.Failed, func(e client.BlockError) bool { return e.Chunk == n })
				if b.looksAt(t, n, failed); !failed {
					whole++
				}
			}
		}
		own := b.Find(killKey(chunks))
		if r := b.Get(own, client.LoadOptions{}, client.LoadChunk{Blocks: killIDs(chunks)}); own.Hits() != 1 || len(r.Failed) > 0 {
			t.Fatalf("%d hits and failures %v of what this host has itself", own.Hits(), r.Failed)
		}
		b.looksAt(t, chunks, false)
		return whole
	}
	// The first ones may be fetched: a way that is known may wait for the memory of the slots, or be tried a second time.
	const all = chunks * killLayers * 16 * killPage
	byNIXL := func() int64 { return gauge(t, httpAddress(t, logB), "kvhost_peer_nixl_bytes_total") }
	testenv.Until(t, "all bytes of a load by NIXL", func() bool {
		before := byNIXL()
		if n := load(); n != chunks {
			t.Fatalf("%d chunks of the peer, want %d", n, chunks)
		}
		return byNIXL()-before >= all
	})
	signalled := make(chan error, 1)
	time.AfterFunc(20*time.Millisecond, func() { signalled <- lender.Signal(signal) })
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); { // its lease would last longer
		load()
	}
	testenv.OK(t, <-signalled)
	if signal == syscall.SIGKILL {
		awaitPeerGauge(t, logB, "kvhost_peer_here", 0, 0)
		if n := b.Find(keys...).Hits(); n != 0 {
			t.Errorf("%d hits of a host that was killed, want none", n)
		}
		return
	}
	time.AfterFunc(10*time.Millisecond, func() { signalled <- lender.Signal(syscall.SIGCONT) })
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); { // while what was given up arrives
		load()
	}
	testenv.OK(t, <-signalled)
	testenv.Until(t, "all chunks of a host that goes on", func() bool { return load() == chunks })
	if text := logB(); strings.Contains(text, "out of service") {
		t.Error("a root went out of service for a peer")
	}
}

var nixlLiars = flag.Duration("nixl.liars", 0, "how long TestLiarsByNIXL goes on with random seeds")

// TestLiarsByNIXL: with a peer in another process of this machine that is read by NIXL and lies by its seed, of its memory, of its agent, and of what it has, and a caller that takes places
// and gives back what it has not, what an honest peer has is loaded, by NIXL and with its own bytes; no other byte comes, and no host ends.
func TestLiarsByNIXL(t *testing.T) {
	testenv.Need(t, testenv.NIXL, testenv.OthersMemory)
	const chunks, rounds = 3, 12
	poison := slices.Repeat([]byte{0xa5}, killPage)
	tally := testenv.NewTally(t, "nixl-liars")
	at := freeAddress(t)
	_, _, a := startNIXL(t, nil, "", fmt.Sprintf("listen = %q\nbandwidth = 0", at))
	hello := hosttest.Hello("", kv.Uniform(16, killLayers, 1, killPage))
	bytes, err := replay.Shape{Ranks: 1, ChunkBytes: 16 * killLayers * killPage, PageBytes: killPage, Layers: killLayers}.EntryBytes(t.Context(), nil, nil)
	testenv.OK(t, err)
	var keys []kv.Key
	for n := range chunks {
		a.putOwn(n)
		keys = append(keys, killKey(n))
	}
	(&attack{What: "places", From: "127.0.0.3", To: at, Namespace: hello.Namespace.Digest(), Keys: keys, Bytes: 1 << 20}).start(t)
	lib, err := nixl.Open(filepath.Join(testenv.Root(), ".build", "nixl"))
	testenv.OK(t, err)
	run := func(seed uint64) bool {
		return t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			agent, err := lib.Agent(hex.EncodeToString(peerdouble.Host), 1)
			testenv.OK(t, err)
			memory, err := staging.Map(4 << 20)
			testenv.OK(t, err)
			testenv.OK(t, agent.Register(memory.Bytes()))
			liar := peerdouble.NewLiar(t, seed, uint64(bytes))
			liar.NIXL, err = agent.Metadata()
			testenv.OK(t, err)
			t.Cleanup(func() { testenv.NoError(t, errors.Join(agent.Close(), memory.Unmap())) })
			liar.Address, liar.Room = uint64(uintptr(unsafe.Pointer(&memory.Bytes()[0]))), 4<<20
			for n := range 2 * chunks {
				liar.Has = append(liar.Has, kv.Fingerprint(hello.Namespace.Digest(), 0, killKey(n)))
			}
			logB, process, b := startNIXL(t, nil, "", fmt.Sprintf("hosts = \"%s,%s\"", at, liar.Serve(t, "127.0.0.1:0")))
			awaitPeerGauge(t, logB, "kvhost_peer_nixl", 1, 2) // a liar with other metadata may never be read by NIXL
			byNIXL := func() int64 { return gauge(t, httpAddress(t, logB), "kvhost_peer_nixl_bytes_total") }
			misses, failures := 0, 0
			// load says whether a chunk has come, and looks at what has.
			load := func(n int) bool {
				for plane := range killLayers {
					for _, id := range killIDs(n % chunks) {
						copy(b.Page(plane, int(id)), poison)
					}
				}
				l := b.Find(killKey(n))
				if l.Hits() == 0 {
					misses++
					return false
				}
				failed := len(b.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: killIDs(n % chunks)}).Failed) > 0
				if failed {
					failures++
				}
				if n < chunks {
					b.looksAt(t, n, failed)
				}
				return !failed
			}
			testenv.Until(t, "chunk that an honest peer gives by NIXL", func() bool { return load(0) && byNIXL() > 0 })
			for range rounds {
				for n := range chunks {
					testenv.Until(t, fmt.Sprint("chunk ", n, " of an honest peer"), func() bool { return load(n) })
					if load(chunks + n) {
						t.Errorf("chunk %d has come from a liar", chunks+n)
					}
				}
			}
			t.Logf("%d misses and %d loads failed beside %d, %d MiB by NIXL; %d lies", misses, failures, rounds*chunks, byNIXL()>>20, liar.Lies())
			if failures > 10 {
				t.Errorf("%d loads have failed, want the liar left alone within ten", failures)
			}
			testenv.OK(t, process.Signal(syscall.Signal(0)))
			tally.Add(rounds*2*chunks, 0, 1)
		})
	}
	for seed := range uint64(2) {
		run(seed)
	}
	testenv.FreshSeeds(*nixlLiars, run)
}

// putOwn stores chunk n, whose bytes say which it is.
func (p *killPeer) putOwn(n int) {
	for plane := range killLayers {
		for b, id := range killIDs(0) {
			copy(p.Page(plane, int(id)), ownPage(n, plane, b))
		}
	}
	p.Put(client.StoreChunk{Key: killKey(n), Blocks: killIDs(0)})
}

func ownPage(n, plane, block int) []byte {
	return bytes.Repeat([]byte{byte(n + 1), byte(plane), byte(block), 7}, killPage/4)
}

// looksAt says that the blocks of chunk n have its bytes, or, if it has failed, those that were there before.
func (p *killPeer) looksAt(t *testing.T, n int, failed bool) {
	t.Helper()
	for plane := range killLayers {
		for i, id := range killIDs(n) {
			page := p.Page(plane, int(id))
			right := bytes.Equal(page, ownPage(n, plane, i))
			if poison := bytes.Count(page, []byte{0xa5}) == len(page); !right && !(failed && poison) {
				t.Fatalf("chunk %d (failed: %v): plane %d block %d holds other bytes than were stored", n, failed, plane, i)
			}
		}
	}
}

// awaitPeerGauge waits until the metric of a host's peers has a value from least to most.
func awaitPeerGauge(t *testing.T, logged func() string, name string, least, most int64) {
	t.Helper()
	address := httpAddress(t, logged)
	got, there := int64(-1), false // it is there once the host has resolved its peers
	testenv.Until(t, fmt.Sprintf("%s from %d to %d", name, least, most), func() bool {
		if !there {
			r, err := http.Get("http://" + address + "/metrics")
			testenv.OK(t, err)
			text, err := io.ReadAll(r.Body)
			testenv.OK(t, errors.Join(err, r.Body.Close()))
			there = bytes.Contains(text, []byte("\n"+name+"{"))
		} else {
			got = gauge(t, address, name)
		}
		return least <= got && got <= most
	}, func() any { return got })
}
