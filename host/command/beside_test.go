package command

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

var besideRounds = flag.Int("beside.rounds", 0, "how often TestBesideAnAttacker reads, stores and loads, with an attacker, without one and with one of another host; in turns")

const (
	besidePage   = 64 << 10
	besideRoom   = 120 // chunks. Half may be lent, of which one has at most half
	besideHere   = 90
	besideMemory = 256 << 20 // max_memory
)

func besideKey(n int) kv.Key { return kv.Key{byte(n), byte(n >> 8), 1} }

// beside is a host with what a peer and a session do at it.
type beside struct {
	*testing.T
	to      string // the peers' port
	socket  string
	pid     int
	space   kv.Digest
	session *hosttest.Client
	peer    proto.PeerServiceClient
	bytes   uint64 // of a piece
	stores  int
}

func newBeside(t *testing.T) *beside {
	dir := testenv.Dir(t)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	b := &beside{T: t, to: free.Addr().String()}
	testenv.OK(t, free.Close())
	n, err := replay.Shape{Ranks: 1, ChunkBytes: besidePage, PageBytes: besidePage, Layers: 1}.EntryBytes(t.Context(), nil, nil)
	testenv.OK(t, err)
	b.bytes = uint64(n)
	conf := write(t, dir, "k.toml", fmt.Sprintf("socket = \"s\"\nmax_memory = %d\n[http]\nlisten = %q\n[session]\nmax_sessions = 16\n[engine]\nmax_staging_memory = \"64MiB\"\n"+
		"[[root]]\npath = \"kv\"\ncapacity = %d\n[peers]\nlisten = %q\nbandwidth = \"32MiB\"\n", besideMemory, anyPort, besideRoom*n, b.to))
	cmd, _, _ := startHost(t, dir, "--config", conf, "--log-format", "json")
	b.pid = cmd.Process.Pid
	b.socket = filepath.Join(dir, "s")
	hello := hosttest.Hello(b.socket, kv.Uniform(1, 1, 1, besidePage))
	b.space = hello.Namespace.Digest()
	b.session = hosttest.Dial(t, hello, 2, 0, 0)
	b.peer, err = callerFrom("127.0.0.2", b.to)
	testenv.OK(t, err)
	return b
}

// stored is the key of a store. A peer reads what was stored lately, which no attacker has.
func (b *beside) stored(n int) kv.Key { return kv.Key{byte(n), byte(n >> 8), 2} }

func (b *beside) store(k kv.Key, with byte) bool {
	page := b.session.Page(0, 0)
	copy(page, bytes.Repeat([]byte{with}, len(page)))
	return b.session.Put(client.StoreChunk{Key: k, Blocks: []uint32{0}}).Chunks[0].Result == client.Stored
}

// fill stores what is not there of what an attacker asks for, and a first chunk for a peer.
func (b *beside) fill() {
	if b.stores == 0 {
		b.stores = 1
		b.store(b.stored(1), 1)
	}
	for n := range besideHere {
		if l := b.session.Find(besideKey(n)); l.Hits() == 0 && !b.store(besideKey(n), byte(n)) {
			b.Fatalf("chunk %d was not stored", n)
		} else if err := l.Release(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// counts are how often it has read, stored and loaded, how long each took, and how many processors the host had.
type counts struct {
	rounds      int
	took        [3][]time.Duration
	used, total time.Duration
}

func (c *counts) processors() float64 { return c.used.Seconds() / c.total.Seconds() }

// goes has a peer read what is there, and a session store and load.
func (b *beside) goes(rounds int, c *counts) {
	timed := func(what int, does func() bool) {
		since := time.Now()
		if does() {
			c.took[what] = append(c.took[what], time.Since(since))
		}
	}
	c.rounds += rounds
	used, since := processorTime(b.T, b.pid), time.Now()
	defer func() {
		c.used += processorTime(b.T, b.pid) - used
		c.total += time.Since(since)
	}()
	for range rounds {
		timed(0, func() bool {
			ctx, stop := context.WithTimeout(b.Context(), 10*time.Second)
			defer stop()
			r, err := b.peer.Lease(ctx, leaseOf(b.space, b.stored(max(1, b.stores-4))))
			if err != nil || len(r.GetEntries()) == 0 {
				return false
			}
			data, err := fetch(ctx, b.peer, r.GetLease(), b.bytes)
			_, _ = b.peer.Return(ctx, &proto.ReturnRequest{Lease: r.GetLease()})
			return err == nil && len(data) == int(b.bytes)
		})
		b.stores++
		k, with := b.stored(b.stores), byte(b.stores)
		timed(1, func() bool { return b.store(k, with) })
		timed(2, func() bool {
			l := b.session.Find(k)
			if l.Hits() == 0 {
				return false
			}
			page := b.session.Page(0, 1)
			copy(page, bytes.Repeat([]byte{^with}, len(page)))
			r := b.session.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{1}})
			return len(r.Failed) == 0 && bytes.Count(page, []byte{with}) == len(page)
		})
	}
}

// TestBesideAnAttacker: beside a caller in another process that holds all it may of anything, a peer that reads, and a session that stores and loads, have half at least of
// what they ask for, and the host's memory as the kernel counts it is below max_memory. With -beside.rounds it says how long they take, in turns with none and with the
// same attack on another host of the machine.
func TestBesideAnAttacker(t *testing.T) {
	kinds := []string{"connections", "streams", "half messages", "buffers", "leases", "keys", "entries", "turns", "questions", "questions of a crowd", "calls", "lists", "nonsense", "settings"}
	if *besideRounds > 0 {
		kinds = append(kinds, "bytes", "numbers", "knocks", "resets", "windows", "socket/settings", "socket/windows", "socket/resets", "socket/nonsense", "socket/elements", "socket/sessions", "socket/knocks")
	}
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			b := newBeside(t)
			what, socket := strings.CutPrefix(kind, "socket/")
			attacker := func(to *beside) func() {
				a := &attack{What: what, From: "127.0.0.3", To: to.to, Namespace: to.space, Bytes: to.bytes}
				if socket {
					a.To = to.socket
				}
				for n := range besideHere {
					a.Keys = append(a.Keys, besideKey(n))
				}
				to.fill()
				return a.start(t)
			}
			var with counts
			if *besideRounds == 0 {
				end := attacker(b)
				b.goes(30, &with)
				end()
			} else {
				var without, control counts
				another := newBeside(t)
				b.fill()
				b.goes(*besideRounds, &counts{})
				for range 6 { // other work of the machine should hit all of them
					b.fill()
					b.goes(*besideRounds, &without)
					end := attacker(another)
					b.fill()
					b.goes(*besideRounds, &control)
					end()
					end = attacker(b)
					b.goes(*besideRounds, &with)
					end()
				}
				t.Logf("the host had %.2f processors without, %.2f with an attack on another host, %.2f on this", without.processors(), control.processors(), with.processors())
				for i, name := range []string{"read", "store", "load"} {
					p99 := func(c *counts) float64 { return millis(c.took[i], 0.99) }
					t.Logf("%s: %d of %d; p99 %.2f ms without, %.2f of it with an attack on another host, %.2f on this; %.2f of the other's; p50 %.2f ms, %.2f, %.2f", name, len(with.took[i]), with.rounds,
						p99(&without), p99(&control)/p99(&without), p99(&with)/p99(&without), p99(&with)/p99(&control),
						millis(without.took[i], 0.5), millis(control.took[i], 0.5)/millis(without.took[i], 0.5), millis(with.took[i], 0.5)/millis(without.took[i], 0.5))
				}
			}
			for i, name := range []string{"reads of a peer", "stores", "loads"} {
				if n := len(with.took[i]); n < with.rounds/2 {
					t.Errorf("%d of %d %s beside one that takes %s, want half at least", n, with.rounds, name, what)
				}
			}
			n := resident(t, b.pid)
			t.Logf("%d MiB resident at most", n>>20)
			if n > besideMemory {
				t.Errorf("the host had %d bytes of memory beside one that takes %s, want at most %d", n, what, besideMemory)
			}
		})
	}
}

// processorTime is the time of processors that a process has used.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	testenv.OK(t, err)
	_, rest, _ := strings.Cut(string(text), ") ")
	f := strings.Fields(rest)
	user, err := strconv.ParseInt(f[11], 10, 64)
	testenv.OK(t, err)
	system, err := strconv.ParseInt(f[12], 10, 64)
	testenv.OK(t, err)
	return time.Duration(user+system) * 10 * time.Millisecond
}

// resident is the most memory that a process has had at once, as the kernel counts it.
func resident(t *testing.T, pid int) (bytes int64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0 // it has ended
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			_, err := fmt.Sscan(rest, &bytes)
			testenv.OK(t, err)
		}
	}
	return bytes << 10
}
