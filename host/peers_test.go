package host_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
)

// among is a configuration that lends, and borrows from these hosts.
func among(t *testing.T, hosts ...string) *config.Config {
	t.Helper()
	c := configuration(t)
	c.Peers.Listen, c.Peers.Hosts = "127.0.0.1:0", strings.Join(hosts, ",")
	testenv.OK(t, c.Validate())
	c.Peers.Deadline = time.Minute
	return c
}

// awaitPeer waits until what a host knows of its only peer is as wanted.
func awaitPeer(t *testing.T, h *host.Host, what string, ok func(*proto.PeerStatus) bool) *proto.PeerStatus {
	t.Helper()
	var last []*proto.PeerStatus
	testenv.Until(t, "a peer that is "+what, func() bool {
		last = h.Status().Peers
		return len(last) == 1 && ok(last[0])
	}, func() any { return last })
	return last[0]
}

func knows(entries uint64) func(*proto.PeerStatus) bool {
	return func(p *proto.PeerStatus) bool { return p.State == "here" && p.Entries == entries }
}

// misses says that a lookup of a chunk finds nothing.
func (r *compressionRank) misses(n int) bool { return r.Find(compressionKey(n)).Hits() == 0 }

// fails loads a chunk that was found, of which no byte may be delivered wrong, and says whether its blocks failed.
func (r *compressionRank) fails(n int, l *client.Lookup) bool {
	r.t.Helper()
	r.Poison()
	at := []uint32{0, 1, 2, 3}
	o := r.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: at})
	for plane := range planeCount {
		for b, id := range at {
			page := r.Page(plane, int(id))[:pageBytes]
			if right := values(n, r.rank, plane, b); !bytes.Equal(page, right) && !bytes.Equal(page, bytes.Repeat([]byte{0xa5}, pageBytes)) {
				r.t.Errorf("chunk %d: plane %d block %d holds other bytes than were stored", n, plane, b)
			}
		}
	}
	return len(o.Failed) == len(at)
}

// TestPeers: what one host has stored is a hit at another, whole and by layers, compressed and not, with the right bytes; what it discards
// is a miss there.
func TestPeers(t *testing.T) {
	for _, compression := range []string{config.CompressionOff, config.CompressionHuffman} {
		t.Run(compression, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 2))
			const chunks, more = 6, 2
			ca := among(t)
			ca.Store.Compression = compression
			a, two, _ := twoRanks(t, host.Config{Config: ca})
			for n := range chunks + more {
				for _, r := range two {
					r.store(n, random)
				}
			}
			b, others, _ := twoRanks(t, host.Config{Config: among(t, a.PeerAddr())})
			awaitPeer(t, b, "all entries told", knows(chunks+more))
			for n := range chunks {
				for rank, r := range others {
					if !r.load(n, n%2 == rank, random) {
						t.Errorf("chunk %d of a peer is a miss", n)
					}
				}
			}
			if s := awaitPeer(t, b, "bytes read", func(p *proto.PeerStatus) bool { return p.Bytes > 0 }); s.Asks != chunks || s.Struck != 0 ||
				s.Failures != 0 || s.Blamed != 0 {
				t.Errorf("the peer is %v, want %d asks and no fault", s, chunks)
			}
			for n := range more {
				if _, err := two[0].Discard(t.Context(), 0, []kv.Key{compressionKey(chunks + n)}); err != nil {
					t.Fatal(err)
				}
			}
			awaitPeer(t, b, "what is left", knows(chunks))
			for n := range more {
				if !others[0].misses(chunks + n) {
					t.Errorf("chunk %d is a hit after the peer has told that it went", chunks+n)
				}
			}
		})
	}
}

// TestPeerWithDamage: a peer with flipped bytes on its disk costs the load. No wrong byte is delivered, the next lookup misses, and the
// peer is named and left alone.
func TestPeerWithDamage(t *testing.T) { peerWithDamage(t, "") }

func peerWithDamage(t *testing.T, nixl string) {
	random := rand.New(rand.NewPCG(3, 4))
	ca := among(t)
	ca.Peers.NIXL = nixl
	a, two, _ := twoRanks(t, host.Config{Config: ca})
	for n := range 2 {
		for _, r := range two {
			r.store(n, random)
		}
	}
	testenv.OK(t, filepath.WalkDir(ca.Roots[0].Path, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, ".kv") {
			return err
		}
		b, err := os.ReadFile(path)
		if err == nil {
			b[len(b)/2] ^= 1
			err = os.WriteFile(path, b, 0o600)
		}
		return err
	}))
	cb := among(t, a.PeerAddr())
	cb.Peers.NIXL = nixl
	b, others, _ := twoRanks(t, host.Config{Config: cb})
	awaitPeer(t, b, "all entries told", func(p *proto.PeerStatus) bool { return knows(2)(p) && p.Nixl == (nixl != "") })
	l := others[0].Find(compressionKey(0))
	if l.Hits() != 1 {
		t.Fatalf("%d hits, want 1", l.Hits())
	}
	if !others[0].fails(0, l) {
		t.Error("a load of damaged bytes delivered blocks, want all to fail")
	}
	s := awaitPeer(t, b, "left alone", func(p *proto.PeerStatus) bool { return p.State == "alone" && p.Blamed == 1 })
	if by := s.NixlBytes > 0; by != (nixl != "") {
		t.Errorf("%d bytes came by NIXL", s.NixlBytes)
	}
	if !strings.Contains(s.Reason, "wrong bytes") {
		t.Errorf("the peer is left alone because of %q, want wrong bytes named", s.Reason)
	}
	for n := range 2 {
		if !others[0].misses(n) {
			t.Errorf("chunk %d of a peer with wrong bytes is a hit", n)
		}
	}
	for _, r := range b.Status().Roots {
		if r.Quarantine != 0 || r.State != proto.RootState_ROOT_STATE_IN_SERVICE {
			t.Errorf("root %v, want none with a fault", r)
		}
	}
}

// TestPeerWithAnotherLayout: chunks in a layout that is not known here fail one load and are not asked for again; the peer is not blamed.
func TestPeerWithAnotherLayout(t *testing.T) {
	random := rand.New(rand.NewPCG(11, 12))
	ca := among(t)
	ca.PolicyDir, ca.Policies = policytest.Dir(t, "blockmajor"), []config.Policy{{Module: "blockmajor"}}
	a, two, _ := twoRanks(t, host.Config{Config: ca})
	for n := range 2 {
		for _, r := range two {
			r.store(n, random)
		}
	}
	b, others, _ := twoRanks(t, host.Config{Config: among(t, a.PeerAddr())})
	awaitPeer(t, b, "all entries told", knows(2))
	if l := others[0].Find(compressionKey(0)); l.Hits() != 1 || !others[0].fails(0, l) {
		t.Errorf("%d hits, want one and its load to fail", l.Hits())
	}
	for n := range 2 {
		if !others[0].misses(n) {
			t.Errorf("chunk %d in a layout that is not known here is a hit", n)
		}
	}
	if p := b.Status().Peers[0]; p.State != "here" || p.Blamed != 0 || p.Asks != 1 {
		t.Errorf("the peer is %v, want it here, asked once and not blamed", p)
	}
}

// TestPrivateTenantsOfPeers: a private tenant's chunks are no hit of another tenant's at a peer, and those of the same tenant are.
func TestPrivateTenantsOfPeers(t *testing.T) {
	private := func(hosts ...string) *config.Config {
		c := among(t, hosts...)
		c.Tenants = []config.Tenant{{TenantIDs: config.TenantIDs{First: 7, Last: 8}, Private: true}}
		return c
	}
	dial := func(h *host.Host, tenant uint32) *hosttest.Client {
		hello := hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192))
		hello.Tenant, hello.Engine = tenant, "of tenant"
		return hosttest.Dial(t, hello, 8, 0, 0)
	}
	a, _ := hosttest.Start(t, private())
	key := kv.Key{1}
	if r := dial(a, 7).Put(client.StoreChunk{Key: key, Blocks: []uint32{0, 1}}); r.Chunks[0].Result != client.Stored {
		t.Fatalf("%+v, want a stored chunk", r)
	}
	b, _ := hosttest.Start(t, private(a.PeerAddr()))
	awaitPeer(t, b, "one entry told", knows(1))
	for tenant, want := range map[uint32]int{0: 0, 8: 0, 7: 1} {
		if n := dial(b, tenant).Find(key).Hits(); n != want {
			t.Errorf("tenant %d has %d hits of what tenant 7 has stored at a peer, want %d", tenant, n, want)
		}
	}
}

// TestOthersDoNotWaitForPeers: while a lookup waits for a peer that does not answer, the session's other messages are answered; a request
// that ends takes its lookup with it.
func TestOthersDoNotWaitForPeers(t *testing.T) {
	random := rand.New(rand.NewPCG(9, 10))
	a, two, _ := twoRanks(t, host.Config{Config: among(t)})
	for _, r := range two {
		r.store(0, random)
	}
	between := newDam(t, a.PeerAddr())
	c := among(t, between.addr)
	b, others, _ := twoRanks(t, host.Config{Config: c})
	awaitPeer(t, b, "all entries told", knows(1))
	others[0].store(1, random)
	between.shut()
	answered := make(chan int, 1)
	go func() {
		l, err := others[0].Lookup(t.Context(), client.LookupRequest{Request: 5, Keys: []kv.Key{compressionKey(0)}})
		if err != nil {
			t.Error(err)
		}
		answered <- l.Hits()
	}()
	awaitPeer(t, b, "asked", func(p *proto.PeerStatus) bool { return p.Asks == 1 })
	for range 3 {
		others[0].Find(compressionKey(1))
	}
	testenv.OK(t, others[0].EndRequest(t.Context(), 5, client.Hints{}))
	select {
	case <-answered:
		t.Fatal("the lookup did not wait for the peer: nothing was tested")
	default:
	}
	between.open()
	if n := <-answered; n != 0 {
		t.Errorf("%d hits for a request that has ended, want none", n)
	}
}

// TestSessionEndsWhileItAsks: a session ends while a peer is asked for it, at once, and keeps nothing of what its lookup had found.
func TestSessionEndsWhileItAsks(t *testing.T) {
	random := rand.New(rand.NewPCG(11, 12))
	a, two, _ := twoRanks(t, host.Config{Config: among(t)})
	for _, r := range two {
		r.store(0, random)
	}
	between := newDam(t, a.PeerAddr())
	b, others, _ := twoRanks(t, host.Config{Config: among(t, between.addr)})
	awaitPeer(t, b, "all entries told", knows(1))
	for _, r := range others {
		r.store(1, random)
	}
	between.shut()
	defer between.open()
	answered := make(chan error, 1)
	go func() {
		_, err := others[0].Lookup(t.Context(), client.LookupRequest{Keys: []kv.Key{compressionKey(1), compressionKey(0)}})
		answered <- err
	}()
	awaitPeer(t, b, "asked", func(p *proto.PeerStatus) bool { return p.Asks == 1 })
	const silence = 15 * time.Second // that ends the call in any case
	end := time.Now().Add(silence * 2 / 3)
	others[0].Close()
	if err := <-answered; err == nil {
		t.Error("the lookup of a session that was closed was answered, want an error")
	}
	for ; ; time.Sleep(time.Millisecond) {
		results, err := others[1].Discard(t.Context(), 0, []kv.Key{compressionKey(1)})
		testenv.OK(t, err)
		if time.Now().After(end) {
			t.Fatalf("what the lookup had found is %v after %s, want it removed", results, silence*2/3)
		} else if results[0] == client.Removed {
			return
		}
	}
}

// dam passes bytes on to an address, or holds them back.
type dam struct {
	addr string
	mu   sync.RWMutex // held by who shuts it
}

func (d *dam) shut() { d.mu.Lock() }
func (d *dam) open() { d.mu.Unlock() }

func newDam(t *testing.T, to string) *dam {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	t.Cleanup(func() { l.Close() })
	d := &dam{addr: l.Addr().String()}
	pass := func(from, to net.Conn) {
		defer to.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			d.mu.RLock()
			_, werr := to.Write(buf[:n])
			d.mu.RUnlock()
			if err != nil || werr != nil {
				return
			}
		}
	}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			go pass(in, out)
			go pass(out, in)
		}
	}()
	return d
}

// TestCheckAsksPeers: a check says which peers answer, and a host starts without those that do not.
func TestCheckAsksPeers(t *testing.T) {
	a, _ := hosttest.Start(t, among(t))
	c := among(t, a.PeerAddr(), "127.0.0.1:1")
	found := host.Check(t.Context(), host.Config{Config: c})
	if found.Refused != nil {
		t.Errorf("refused: %v, want no reason in a peer", found.Refused)
	}
	said := map[string]string{}
	for _, f := range found.Findings {
		said[f.About] = f.Says
	}
	if said["peer "+a.PeerAddr()] != "it lends" || !strings.Contains(said["peer 127.0.0.1:1"], "does not lend") {
		t.Errorf("the check says %v, want which peer lends", said)
	}
}

// TestPeersAndPolicies: the built-in policy evicts what is borrowed, before and after a reload, and a place policy is not told of that root.
func TestPeersAndPolicies(t *testing.T) {
	c := among(t, "127.0.0.1:1")
	c.PolicyDir, c.Policies = policytest.Dir(t, "lru", "striped"), []config.Policy{{Module: "lru"}, {Module: "striped"}}
	h, two, _ := twoRanks(t, host.Config{Config: c})
	random := rand.New(rand.NewPCG(13, 14))
	for run := range 2 {
		two[0].store(run, random)
		evicts := map[string]string{}
		for _, p := range h.Status().Policies {
			if p.Root != "" {
				evicts[p.Root] = p.Digest
			}
		}
		if own := c.Roots[0].Path; evicts["peers:"] != "" || evicts[own] == "" {
			t.Errorf("digests of the policies that evict, by root: %v, want one of %s alone", evicts, own)
		}
		next := c.Clone()
		next.Roots[0].Capacity /= 2
		if _, err := h.Reload(t.Context(), next); err != nil {
			t.Fatal(err)
		}
	}
	next := c.Clone()
	next.Peers.Hosts = ""
	if _, err := h.Reload(t.Context(), next); !errors.Is(err, host.ErrRestart) {
		t.Errorf("a reload with other peers: %v, want %v", err, host.ErrRestart)
	}
}

// boaster promises an entry, and has none.
type boaster struct {
	proto.UnimplementedPeerServiceServer
	has   []uint64 // fingerprints
	asked atomic.Int64
}

func (f *boaster) Residents(_ *proto.ResidentsRequest, st grpc.ServerStreamingServer[proto.ResidentsResponse]) error {
	m := &proto.ResidentsResponse{Host: bytes.Repeat([]byte{7}, 16), Whole: true}
	for _, fp := range f.has {
		m.Added = binary.LittleEndian.AppendUint64(m.Added, fp)
	}
	if err := st.Send(m); err != nil {
		return err
	}
	<-st.Context().Done()
	return nil
}

func (f *boaster) Lease(context.Context, *proto.LeaseRequest) (*proto.LeaseResponse, error) {
	f.asked.Add(1)
	return &proto.LeaseResponse{}, nil
}

// TestNextPeer: what a peer has evicted after it was promised comes from another that has it, in the same lookup.
func TestNextPeer(t *testing.T) {
	random := rand.New(rand.NewPCG(15, 16))
	a, two, _ := twoRanks(t, host.Config{Config: among(t)})
	for _, r := range two {
		r.store(0, random)
	}
	space := rankSpace("m")
	f := &boaster{}
	for n := range 2 { // a longer run: it is asked first
		f.has = append(f.has, kv.Fingerprint(space.Digest(), 0, compressionKey(n)))
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.OK(t, err)
	s := grpc.NewServer()
	proto.RegisterPeerServiceServer(s, f)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	b, others, _ := twoRanks(t, host.Config{Config: among(t, a.PeerAddr(), l.Addr().String())})
	var entries uint64
	testenv.Until(t, "3 entries of peers", func() bool {
		entries = 0
		for _, p := range b.Status().Peers {
			entries += p.Entries
		}
		return entries == 3
	}, func() any { return entries })
	if n := others[0].Find(compressionKey(0), compressionKey(1)).Hits(); n != 1 || f.asked.Load() == 0 {
		t.Errorf("%d hits after %d asks of a peer that has evicted what it promised, want 1 of the other, and some", n, f.asked.Load())
	}
}
