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
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// TestPeerDies loads from a host of another process, which is killed or stopped on the way. The load ends, each block is right or named as
// failed, lookups go on, and what this host has itself is a hit. A host that was only stopped lends again when it goes on.
func TestPeerDies(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(signal.String(), func(t *testing.T) {
			t.Parallel() // it waits more than it works
			peerDies(t, signal)
		})
	}
}

func peerDies(t *testing.T, signal syscall.Signal) {
	const chunks = killBlocks / 16
	free, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	at := free.Addr().String()
	testenv.OK(t, free.Close())
	start := func(more string) (func() string, *os.Process, *killPeer) {
		dir := shortDir(t)
		conf := write(t, dir, "k.toml", fmt.Sprintf("socket = %q\n[http]\nlisten = %q\n[store]\nmemory = 0\n[[root]]\npath = %q\ncapacity = \"1GiB\"\n[peers]\n%s\n",
			filepath.Join(dir, "s"), anyPort, filepath.Join(dir, "kv"), more))
		cmd, logged, _ := startHost(t, dir, "--config", conf, "--log-format", "json")
		return logged, cmd.Process, dialToKill(t, filepath.Join(dir, "s"))
	}
	logA, process, a := start(fmt.Sprintf("listen = %q\nbandwidth = \"4MiB\"", at))
	for n := range chunks {
		a.putOwn(n)
	}
	logB, _, b := start(fmt.Sprintf("hosts = %q", at))
	awaitPeerGauge(t, logB, "kvhost_peer_entries", chunks)
	b.putOwn(200)
	var keys []kv.Key
	var wanted []client.LoadChunk
	for n := range chunks {
		keys, wanted = append(keys, killKey(n)), append(wanted, client.LoadChunk{Index: n, Blocks: killIDs(n)})
	}
	l := b.Find(keys...)
	if l.Hits() != chunks {
		t.Fatalf("%d hits, want %d", l.Hits(), chunks)
	}
	b.Poison()
	job, err := b.Load(t.Context(), l, wanted, client.LoadOptions{})
	testenv.OK(t, err)
	testenv.Until(t, "bytes that are lent", func() bool { return gauge(t, httpAddress(t, logA), "kvhost_lent_bytes_total") > 0 })
	testenv.OK(t, process.Signal(signal))
	r, err := job.Wait(t.Context())
	testenv.OK(t, err)
	if len(r.Failed) == 0 {
		t.Error("no block failed: the load was over too soon")
	}
	for n := range chunks {
		b.looksAt(t, n, slices.ContainsFunc(r.Failed, func(e client.BlockError) bool { return e.Chunk == n }))
	}
	b.Find(keys...)
	if n := b.Find(killKey(200)).Hits(); n != 1 {
		t.Errorf("%d hits of what this host has itself, want 1", n)
	}
	if signal == syscall.SIGKILL {
		awaitPeerGauge(t, logB, "kvhost_peer_here", 0)
		if n := b.Find(keys...).Hits(); n != 0 {
			t.Errorf("%d hits of a host that was killed, want none", n)
		}
		return
	}
	testenv.OK(t, process.Signal(syscall.SIGCONT))
	testenv.Until(t, "a hit of a host that goes on", func() bool { return b.Find(keys[0]).Hits() > 0 })
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
