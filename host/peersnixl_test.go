package host_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/nixl"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// nixlPath is where the library is.
func nixlPath(t testing.TB) string {
	testenv.Need(t, testenv.NIXL, testenv.OthersMemory)
	return filepath.Join(testenv.Root(), ".build", "nixl")
}

// TestPeersByNIXL: what a peer has in memory or in files is read by NIXL, whole and by layers, compressed and not, with the right bytes.
func TestPeersByNIXL(t *testing.T) {
	for _, root := range []string{"memory:", ""} {
		for _, compression := range []string{config.CompressionOff, config.CompressionHuffman} {
			t.Run(root+" "+compression, func(t *testing.T) {
				random := rand.New(rand.NewPCG(1, 2))
				const chunks = 6
				ca := among(t)
				if root != "" {
					ca.Roots = []config.Root{{Path: root, Capacity: 64 << 20}}
				}
				ca.Store.Compression, ca.Peers.NIXL = compression, nixlPath(t)
				a, two, _ := twoRanks(t, host.Config{Config: ca})
				for n := range chunks {
					for _, r := range two {
						r.store(n, random)
					}
				}
				cb := among(t, a.PeerAddr())
				cb.Peers.NIXL = nixlPath(t)
				b, others, _ := twoRanks(t, host.Config{Config: cb})
				awaitPeer(t, b, "all entries told, and read by NIXL", func(p *proto.PeerStatus) bool { return knows(chunks)(p) && p.Nixl })
				for n := range chunks {
					for rank, r := range others {
						if !r.load(n, n%2 == rank, random) {
							t.Errorf("chunk %d of a peer is a miss", n)
						}
					}
				}
				// What is copied to this host's own root meanwhile is read by gRPC, to memory that NIXL does not have.
				s := awaitPeer(t, b, "bytes read", func(p *proto.PeerStatus) bool { return p.NixlBytes > 0 })
				if s.NixlFallbacks != 0 || s.Failures != 0 || s.Blamed != 0 {
					t.Errorf("the peer is %v, want no fallback and no fault", s)
				}
				metrics := get(t, a, "/metrics")
				if !strings.Contains(metrics, "kvhost_lent_nixl_bytes_total ") || strings.Contains(metrics, "kvhost_lent_nixl_bytes_total 0\n") {
					t.Error("the lender has not counted what it lent by NIXL")
				}
			})
		}
	}
}

// TestDamageByNIXL: bytes that come by NIXL are verified as all others.
func TestDamageByNIXL(t *testing.T) { peerWithDamage(t, nixlPath(t)) }

// TestNoNIXL: a host whose library is missing says so, starts, and reads from one that has it by gRPC, as that reads from it.
func TestNoNIXL(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for name, paths := range map[string][2]string{"here": {nixlPath(t), t.TempDir()}, "there": {t.TempDir(), nixlPath(t)}, "off here": {nixlPath(t), ""}} {
		t.Run(name, func(t *testing.T) {
			ca := among(t)
			ca.Peers.NIXL = paths[0]
			a, two, _ := twoRanks(t, host.Config{Config: ca})
			for _, r := range two {
				r.store(0, random)
			}
			cb := among(t, a.PeerAddr())
			cb.Peers.NIXL = paths[1]
			b, others, _ := twoRanks(t, host.Config{Config: cb})
			awaitPeer(t, b, "all entries told", knows(1))
			for _, r := range others {
				if !r.load(0, false, random) {
					t.Error("a chunk of a peer is a miss")
				}
			}
			if s := awaitPeer(t, b, "bytes read", func(p *proto.PeerStatus) bool { return p.Bytes > 0 }); s.NixlBytes != 0 || s.Failures != 0 {
				t.Errorf("the peer is %v, want it read by gRPC without a failure", s)
			}
		})
	}
}

// TestCheckMeasuresPeers: a check says which library there is, what UCX has found, and how fast the memory of each peer is read; and
// without the library what to install.
func TestCheckMeasuresPeers(t *testing.T) {
	ca := among(t)
	ca.Peers.NIXL = nixlPath(t)
	a, _ := hosttest.Start(t, ca)
	c := among(t, a.PeerAddr())
	for path, wants := range map[string][]string{nixlPath(t): {"libnixl_capi.so 1.", "tcp", "it lends", "is read by NIXL, at up to "},
		t.TempDir(): {"pip install nixl", "it lends"}} {
		c.Peers.NIXL = path
		said := fmt.Sprint(host.Check(t.Context(), host.Config{Config: c}).Findings)
		for _, want := range wants {
			if !strings.Contains(said, want) {
				t.Errorf("with the library in %s the check says %s, want %q in it", path, said, want)
			}
		}
	}
}

// BenchmarkPeerLoad loads 4 chunks of 32 MiB from this host's own root, and from that of a peer by gRPC and by NIXL: from the page cache
// and from memory. Beside it NIXL alone reads as many bytes in pieces of the same size, and then with what a load must do to them.
func BenchmarkPeerLoad(b *testing.B) {
	const chunks, blocks, layers, page = 4, 16, 16, 64 << 10
	start := func(root, hosts, nixl string, number int) (*host.Host, *hosttest.Client, []client.LoadChunk, func(int) []kv.Key) {
		conf := hosttest.Configuration(b)
		if root == "files" {
			root = filepath.Join(filepath.Dir(conf.Socket), "root")
		}
		conf.Roots = []config.Root{{Path: root, Capacity: 1 << 30}}
		conf.Peers.Listen, conf.Peers.Hosts, conf.Peers.Bandwidth, conf.Peers.Deadline = "127.0.0.1:0", hosts, 0, time.Second
		conf.Peers.NIXL = nixl
		conf.Move.Bandwidth = 1 // what was borrowed is borrowed again
		h, _ := hosttest.Start(b, conf)
		c := hosttest.Dial(b, hosttest.Hello(h.Socket(), kv.Uniform(blocks, layers, 2, page)), chunks*blocks, 0, 0)
		var wanted []client.LoadChunk
		keys := func(number int) (list []kv.Key) {
			for n := range chunks {
				list = append(list, kv.Key{byte(number), byte(n), 1})
			}
			return list
		}
		for n := range chunks {
			w := client.LoadChunk{Index: n}
			for i := range blocks {
				w.Blocks = append(w.Blocks, uint32(n*blocks+i))
			}
			wanted = append(wanted, w)
			c.Put(client.StoreChunk{Key: keys(number)[n], Blocks: w.Blocks})
		}
		return h, c, wanted, keys
	}
	for _, root := range []string{"files", "memory:"} {
		for _, way := range []string{"", nixlPath(b)} {
			lends, _, _, _ := start(root, "", way, 0)
			h, c, wanted, keys := start(root, lends.PeerAddr(), way, 1)
			for len(h.Status().Peers) == 0 || h.Status().Peers[0].Entries < chunks || way != "" && !h.Status().Peers[0].Nixl {
				time.Sleep(time.Millisecond)
			}
			load := func(number int) func(b *testing.B) {
				return func(b *testing.B) {
					b.SetBytes(chunks * blocks * layers * 2 * page)
					for b.Loop() {
						if r := c.Get(c.Find(keys(number)...), client.LoadOptions{}, wanted...); len(r.Failed) > 0 {
							b.Fatalf("%d blocks failed", len(r.Failed))
						}
					}
				}
			}
			if way == "" {
				b.Run(root+"/own", load(1))
				b.Run(root+"/grpc", load(0))
				continue
			}
			b.Run(root+"/nixl", load(0))
			if s := h.Status().Peers[0]; s.NixlFallbacks > 0 {
				b.Errorf("%d reads went by gRPC", s.NixlFallbacks)
			}
		}
	}
	const bytes = chunks * blocks * layers * 2 * page
	for _, use := range []bool{false, true} {
		b.Run(fmt.Sprintf("plain/verified=%v", use), func(b *testing.B) { plainNIXL(b, bytes, use) })
	}
}

// plainNIXL reads the memory of another agent, in pieces of a MiB, on all processors. To use it is to verify and to copy it.
func plainNIXL(b *testing.B, bytes int, use bool) {
	const piece = 1 << 20
	lib, err := nixl.Open(nixlPath(b))
	testenv.OK(b, err)
	var agents [2]*nixl.Agent
	var mem [2][]byte
	for i := range agents {
		agents[i], err = lib.Agent(fmt.Sprint("plain", i), 2)
		testenv.OK(b, err)
		m, err := staging.Map(bytes)
		testenv.OK(b, err)
		clear(m.Bytes())
		mem[i] = m.Bytes()
		testenv.OK(b, agents[i].Register(mem[i]))
		b.Cleanup(func() { testenv.NoError(b, errors.Join(agents[i].Close(), m.Unmap())) })
	}
	metadata, err := agents[0].Metadata()
	testenv.OK(b, err)
	testenv.OK(b, agents[1].Load("plain0", metadata))
	pages := make([]byte, bytes)
	b.SetBytes(int64(bytes))
	for b.Loop() {
		var all sync.WaitGroup
		threads := runtime.GOMAXPROCS(0)
		for n := range threads {
			all.Go(func() {
				slot := mem[1][n*piece : (n+1)*piece] // as a load: always the same
				for at := n * piece; at < bytes; at += threads * piece {
					from := uint64(uintptr(unsafe.Pointer(&mem[0][at])))
					read, err := agents[1].Read(slot, "plain0", []nixl.Part{{Address: from, Bytes: piece}})
					for done := err != nil; !done; {
						done, err = read.Done()
					}
					if err != nil {
						b.Error(err)
						return
					}
					if use {
						for off := 0; off < piece; off += kv.ExtentBytes {
							kv.Sum(slot[off : off+kv.ExtentBytes])
						}
						copy(pages[at:], slot)
					}
				}
			})
		}
		all.Wait()
	}
}
