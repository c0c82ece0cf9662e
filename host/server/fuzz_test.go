package server

import (
	"testing"

	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/transfer"
)

// FuzzMessages gives a greeted session with registered pages any three messages: each is answered, or is a job that is
// completed, and nothing panics.
func FuzzMessages(f *testing.F) {
	k := key(1)
	packed := proto.AppendKeys(nil, keys(3), 32)
	for _, m := range []*proto.ClientMessage{
		{}, greeting("f"), lookupOf(1), endOf(1),
		{Body: &proto.ClientMessage_Lookup{Lookup: &proto.Lookup{Keys: packed, First: 1, Group: 5, Readers: 1}}},
		{Body: &proto.ClientMessage_Release{Release: &proto.Release{Lease: 1}}},
		{Body: &proto.ClientMessage_Load{Load: &proto.Load{Lease: 1, Layers: true, Chunks: []*proto.LoadChunk{{Blocks: blocks(0)}}}}},
		{Body: &proto.ClientMessage_Store{Store: &proto.Store{Request: 2, Chunks: []*proto.StoreChunk{{Key: k[:], Parent: packed[:32], Blocks: blocks(1)}}}}},
		{Body: &proto.ClientMessage_Cancel{Cancel: &proto.Cancel{Job: 2}}},
		{Body: &proto.ClientMessage_Flush{Flush: &proto.Flush{Jobs: []uint64{1, 2}}}},
		{Body: &proto.ClientMessage_Register{Register: &proto.Register{Group: 5, Regions: []*proto.Region{{Handle: &proto.Region_Memfd{Memfd: 1}}}}}},
		{Body: &proto.ClientMessage_Unregister{Unregister: &proto.Unregister{}}},
		{Body: &proto.ClientMessage_Ping{}},
	} {
		b, err := protobuf.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, b, b)
	}
	data := make([]byte, planes*pageBytes*arenaBlocks)
	f.Fuzz(func(t *testing.T, a, b, c []byte) {
		s := newServer(Config{}, &fakeBackend{})
		st := &fakeStream{ctx: t.Context()}
		x, err := s.admit(st)
		if err != nil {
			t.Fatal(err)
		}
		hello := greeting("f")
		hello.Id = 1
		x.receive(hello)
		mem, err := transfer.NewHostMemory(x.ns.Groups[0].Geometry, regionsOf(data))
		if err != nil {
			t.Fatal(err)
		}
		x.regs[0] = &registration{group: &x.ns.Groups[0], memory: mem}
		for i, raw := range [][]byte{a, b, c} {
			m := &proto.ClientMessage{}
			if protobuf.Unmarshal(raw, m) != nil {
				continue
			}
			m.Id = uint64(i) + 2
			x.receive(m)
			for len(x.backlog) > 0 {
				next := <-x.backlog
				x.inTurn(next)
				x.handled(next)
			}
			s.work.Wait()
			x.waiters.Wait()
			if !answered(x.out, m.Id) {
				t.Fatalf("no answer to %v", m)
			}
		}
		x.end(errClientDone)
		x.teardown()
		s.dismiss(x)
		if left := s.Stats(); left != (Stats{}) {
			t.Fatalf("left: %+v", left)
		}
	})
}

// answered looks for the last answer to a message.
func answered(o *outgoing, id uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, m := range o.queue {
		switch m.Body.(type) {
		case *proto.HostMessage_StoreRead, *proto.HostMessage_LoadLayer:
		default:
			if m.Id == id {
				return true
			}
		}
	}
	return false
}
