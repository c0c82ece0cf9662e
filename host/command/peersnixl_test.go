package command

import (
	"bytes"
	"errors"
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

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
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

func peerDiesInARead(t *testing.T, signal syscall.Signal, environment []string) {
	const chunks = killBlocks/16 - 1 // and one that this host has itself
	free, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	at := free.Addr().String()
	testenv.OK(t, free.Close())
	start := func(root, more string) (func() string, *os.Process, *killPeer) {
		dir := shortDir(t)
		if root == "" {
			root = filepath.Join(dir, "kv")
		}
		conf := write(t, dir, "k.toml", fmt.Sprintf("socket = %q\n[http]\nlisten = %q\n[store]\nmemory = 0\n[move]\nbandwidth = 1\n[[root]]\npath = %q\ncapacity = \"256MiB\"\n[peers]\nnixl = %q\n%s\n",
			filepath.Join(dir, "s"), anyPort, root, filepath.Join(testenv.Root(), ".build", "nixl"), more))
		cmd := command(t, dir, "--config", conf, "--log-format", "json")
		cmd.Env = append(slices.Clone(cmd.Environ()), environment...)
		_, logged, _ := startCommand(t, cmd)
		return logged, cmd.Process, dialToKill(t, filepath.Join(dir, "s"))
	}
	_, lender, a := start("memory:", fmt.Sprintf("listen = %q\nbandwidth = 0", at))
	for n := range chunks {
		a.putOwn(n)
	}
	logB, _, b := start("", fmt.Sprintf("hosts = %q", at))
	b.putOwn(chunks)
	awaitPeerGauge(t, logB, "kvhost_peer_entries", chunks)
	awaitPeerGauge(t, logB, "kvhost_peer_nixl", 1)
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
		awaitPeerGauge(t, logB, "kvhost_peer_here", 0)
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

// awaitPeerGauge waits until the metric of a host's only peer has a value.
func awaitPeerGauge(t *testing.T, logged func() string, name string, want int64) {
	t.Helper()
	address := httpAddress(t, logged)
	got, there := int64(-1), false // it is there once the host has resolved its peers
	testenv.Until(t, fmt.Sprintf("%s of %d", name, want), func() bool {
		if !there {
			r, err := http.Get("http://" + address + "/metrics")
			testenv.OK(t, err)
			text, err := io.ReadAll(r.Body)
			testenv.OK(t, errors.Join(err, r.Body.Close()))
			there = bytes.Contains(text, []byte("\n"+name+"{"))
		} else {
			got = gauge(t, address, name)
		}
		return got == want
	}, func() any { return got })
}
