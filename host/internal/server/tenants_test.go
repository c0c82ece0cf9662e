package server

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	grpcpeer "google.golang.org/grpc/peer"
)

// asUser begins a session of a process of another user and returns the answer to its HELLO.
func asUser(t *testing.T, s *Server, uid uint32, hello *proto.SessionRequest) (*proto.SessionResponse, func()) {
	t.Helper()
	in, out, end := make(chan *proto.SessionRequest), make(chan *proto.SessionResponse, 16), make(chan error, 1)
	ctx := grpcpeer.NewContext(t.Context(), &grpcpeer.Peer{AuthInfo: socket.Peer{UID: uid}})
	go func() {
		end <- s.serve(&fakeStream{ctx: ctx, in: in, seen: func(m *proto.SessionResponse) { out <- m }})
	}()
	hello.Id = 1
	in <- hello
	return <-out, func() {
		close(in)
		<-end
	}
}

func tenantHello(engine string, tenant uint32) *proto.SessionRequest {
	m := greeting(engine)
	m.GetHello().Tenant = tenant
	return m
}

// A user's process is only the tenants that the operator names for the user, and others are refused by name.
func TestUsersAreTheirTenants(t *testing.T) {
	s := fakeServer(t, Config{Rules: socket.Rules{
		{First: 7, Last: 7, UIDs: []uint32{1007}, Sessions: 1}, {First: 8, Last: 8, UIDs: []uint32{1008}},
	}}, &fakeStore{})
	for _, c := range []struct {
		uid, tenant uint32
		may         bool
	}{{1007, 7, true}, {1007, 8, false}, {1008, 7, false}, {1008, 8, true}, {1007, 0, false}} {
		a, end := asUser(t, s, c.uid, tenantHello("e", c.tenant))
		if e := a.GetError(); c.may != (a.GetHello() != nil) || !c.may && (e.GetCode() != proto.Code_CODE_DENIED || e.GetField() != "tenant") {
			t.Errorf("user %d as tenant %d: %v", c.uid, c.tenant, a)
		}
		end()
	}
	_, end := asUser(t, s, 1007, tenantHello("e", 7))
	a, endSecond := asUser(t, s, 1007, tenantHello("f", 7))
	if a.GetError().GetCode() != proto.Code_CODE_LIMIT || !strings.Contains(a.GetError().GetMessage(), "1 sessions") {
		t.Errorf("a session above the tenant's limit: %v", a)
	}
	endSecond()
	end()
}

// The name of an engine is its tenant's own: another tenant can neither take it, nor learn from it that there is one.
func TestEnginesAreTheirTenants(t *testing.T) {
	s := fakeServer(t, Config{}, &fakeStore{})
	w := newTalk(t, s, tenantHello("vllm", 1))
	other := tenantHello("vllm", 2)
	other.GetHello().Namespace.Model = "another model"
	o := newTalk(t, s, other)
	if st := s.Stats(); st.Engines != 2 {
		t.Errorf("figures: got %+v, want two engines", st)
	}
	for _, w := range []*talk{w, o} {
		testenv.OK(t, w.close())
	}
}

// What a private tenant stored is a miss for all others, what others stored is a miss for it, and it takes its own
// entries only away. Tenants that are not private share what they store.
func TestPrivateTenants(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Rules = socket.Rules{{First: 7, Last: 8, Private: true}} })
	peers := map[uint32]*peer{}
	for _, tenant := range []uint32{1, 2, 7, 8} {
		peers[tenant] = r.dial(func(h *client.Hello) { h.Tenant = tenant })
	}
	peers[7].save(0, 2)
	for tenant, hits := range map[uint32]int{1: 0, 2: 0, 7: 2, 8: 0} {
		if n := peers[tenant].look(2).Hits(); n != hits {
			t.Errorf("of what tenant 7 stored, tenant %d finds %d", tenant, n)
		}
	}
	peers[1].save(0, 1)
	for tenant, hits := range map[uint32]int{1: 1, 2: 1, 7: 2, 8: 0} {
		if n := peers[tenant].look(2).Hits(); n != hits {
			t.Errorf("after tenant 1 stored, tenant %d finds %d", tenant, n)
		}
	}
	forged := r.hello()
	forged.Namespace.Extra = map[string]string{privateField: "7"}
	if _, err := client.Dial(t.Context(), forged); err == nil || !strings.Contains(err.Error(), privateField) {
		t.Errorf("a session names the field of private tenants: %v", err)
	}
}

// A session whose tenant, beside another, takes more than half of the processors is not read for a while.
func TestTenantsArePaced(t *testing.T) {
	s := fakeServer(t, Config{}, &fakeStore{})
	s.budgets.Processors = 0.01
	greedy, modest := newTalk(t, s, tenantHello("greedy", 1)), newTalk(t, s, tenantHello("modest", 2))
	paused := func() bool {
		return slices.ContainsFunc(s.usage.List(), func(u *Usage) bool { return u.Tenant == 1 && u.Paused.Load() > 0 })
	}
	keys := make([]byte, 1000*32)
	for n := range keys {
		keys[n] = byte(1 + n/32)
	}
	for n := 0; !paused(); n++ {
		if n == 10_000 {
			t.Fatalf("no pause after %d lookups of 1,000 keys beside another tenant", n)
		}
		modest.ask(&proto.SessionRequest{Body: &proto.SessionRequest_Ping{Ping: &proto.Ping{}}})
		greedy.ask(&proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Request: 1, Keys: keys}}})
	}
	for _, w := range []*talk{greedy, modest} {
		testenv.OK(t, w.close())
	}
}

// A descriptor comes from a process of its session's user, even if another knows the nonce.
func TestDescriptorsOfOtherUsers(t *testing.T) {
	s := fakeServer(t, Config{}, &fakeStore{})
	w := newTalk(t, s, greeting("e"))
	x := only(s)
	f := memfd(t, 4096, 2)
	if err := s.giveDescriptor(socket.Peer{UID: x.memory.uid + 1}, x.nonce, 1, f); err == nil {
		t.Error("another user's descriptor was taken")
	}
	testenv.NoError(t, s.giveDescriptor(socket.Peer{UID: x.memory.uid}, x.nonce, 1, f))
	testenv.OK(t, w.close())
}

func TestLoadsAndStoresThatHangLeaveTenantsWorkers(t *testing.T) {
	for hangs, another := range map[staging.Op]func(p *peer, n int){
		staging.OpRead:  func(p *peer, n int) { p.save(20+n, 21+n) },
		staging.OpWrite: func(p *peer, n int) { p.check(1) },
	} {
		r := newRig(t, nil)
		var peers [3]*peer
		for i := range peers {
			peers[i] = r.dial(func(h *client.Hello) { h.Tenant = uint32(i) })
		}
		peers[0].save(0, 8)
		r.faults.Set(faultfs.Rule{Op: hangs, Path: "*", Fault: faultfs.Fault{Hang: true}})
		for n, p := range peers[1:] {
			if hangs == staging.OpRead {
				p.loads(p.look(1+n*7), 1+n*7)
			} else {
				var list []client.StoreChunk
				for i := range 1 + n*7 {
					list = append(list, chunkOf(100+10*n+i, i))
				}
				_, err := p.Store(t.Context(), 0, 0, list)
				testenv.OK(t, err)
			}
			testenv.OK(t, r.faults.AwaitHanging(testenv.Context(t), 1+n))
		}
		for n := range 8 { // each leaves a worker to those that wait; without one it fails when the disk has not answered in time
			another(peers[0], n)
		}
	}
}

// learns is all that a tenant hears while it looks, stores, looks again and discards, after others have stored some of its keys.
func learns(t *testing.T, tenant uint32, private bool, others bool) (heard, files []string) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Rules = socket.Rules{{First: 7, Last: 8, Private: private}} })
	dial := func(n uint32) *peer {
		return r.dial(func(h *client.Hello) { h.Tenant, h.Engine = n, fmt.Sprint("engine ", n) })
	}
	if others {
		dial(1).save(0, 3)
		dial(8).save(4, 5)
	}
	p := dial(tenant)
	say := func(format string, args ...any) { heard = append(heard, fmt.Sprintf(format, args...)) }
	look := func() int {
		l := p.look(6)
		testenv.OK(t, l.Release(t.Context()))
		return l.Hits()
	}
	say("%d hits", look())
	var list []client.StoreChunk
	for n := range 6 {
		p.fill(n, n)
		list = append(list, chunkOf(n, n))
	}
	res, err := p.store(list)
	testenv.OK(t, err)
	for _, c := range res.Chunks {
		say("%v, %v", c.Result, c.Err)
	}
	say("%d bytes, %d hits", res.Bytes, look())
	p.check(6)
	answers, err := p.Discard(t.Context(), 0, []kv.Key{key(0), key(4), key(9)})
	testenv.OK(t, err)
	say("%v, %d hits", answers, look())
	root := filepath.Join(r.dir, "root")
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".kv") {
			files = append(files, strings.TrimPrefix(path, root))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return heard, files
}

// Whatever others stored, a private tenant hears the same, and its files have the same names. Without that setting a tenant would
// learn of others by hits, by what STORE says, and by what DISCARD says.
func TestPrivateTenantsLearnNothing(t *testing.T) {
	alone, files := learns(t, 7, true, false)
	among, all := learns(t, 7, true, true)
	if !slices.Equal(alone, among) {
		t.Errorf("alone:\n%s\namong others:\n%s", strings.Join(alone, "\n"), strings.Join(among, "\n"))
	}
	if len(files) != 4 || slices.ContainsFunc(files, func(name string) bool { return !slices.Contains(all, name) }) {
		t.Errorf("alone its files are %q, among others' %q", files, all)
	}
	alone, _ = learns(t, 7, false, false)
	among, _ = learns(t, 7, false, true)
	for i, what := range map[int]string{0: "a lookup", 1: "a store", len(alone) - 1: "a discard"} {
		if alone[i] == among[i] {
			t.Errorf("the control learns nothing by %s: %s", what, alone[i])
		}
	}
}

// Where the quotas of all tenants together fit the roots, a tenant that stores and looks again learns nothing of what others
// store: all of its entries stay. Without them it does.
func TestQuotasThatFitTellNothing(t *testing.T) {
	const capacity = 40 * (chunkBytes + 2*pageBytes)
	for _, quotas := range []bool{true, false} {
		r := newRig(t, func(_ *Config, s *store.Config) {
			s.Roots[0].Capacity = capacity
			if quotas {
				s.Quotas = []store.Quota{{First: 1, Last: 2, Share: 0.4}}
			}
		})
		quiet := r.dial(func(h *client.Hello) { h.Tenant, h.Engine = 1, "quiet" })
		quiet.save(0, 12)
		busy := r.dial(func(h *client.Hello) { h.Tenant, h.Engine = 2, "busy" })
		stored := 0
		for n := range 200 {
			res, err := busy.store([]client.StoreChunk{{Key: key(1000 + n), Blocks: blocks(n % 16)}})
			testenv.OK(t, err)
			if res.Chunks[0].Result == client.Stored {
				stored++
			}
		}
		if stored < 100 {
			t.Errorf("quotas %t: the busy tenant stored %d of 200", quotas, stored)
		}
		if hits := quiet.look(12).Hits(); (hits == 12) != quotas {
			t.Errorf("quotas %t: of 12 entries the quiet tenant finds %d", quotas, hits)
		}
	}
}
