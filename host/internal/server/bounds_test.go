package server

import (
	"fmt"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// What waits behind a DISCARD, which waits for a STORE that makes room, is bounded in bytes, and CANCEL is heard still.
func TestBacklogIsBounded(t *testing.T) {
	b := &fakeStore{hold: make(chan struct{})}
	s := fakeServer(t, Config{Memory: memoryOf(t, 64<<20, 4), Limits: Limits{Sessions: 4}}, b)
	w := newTalk(t, s, greeting("a"))
	x := only(s)
	pagesFor(t, x)
	job := w.say(storeOf(1))
	discard := proto.PackKeys(keys(1), 32)
	w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Discard{Discard: &proto.Discard{Keys: discard}}})
	until(t, "the store makes room", func() bool { return x.reserving.Len() > 0 })
	for field, m := range map[string]*proto.SessionRequest{
		"keys":   {Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Keys: make([]byte, (defaultKeys+1)*32)}}},
		"chunks": storeOf(defaultChunks + 1),
	} {
		if e := w.ask(m).GetError(); e.GetCode() != proto.Code_CODE_LIMIT || e.GetField() != field {
			t.Errorf("message above the limit of %s: got %v", field, e)
		}
	}
	packed := proto.PackKeys(keys(defaultKeys), 32)
	var last uint64
	waits := 0
	const may = 16 << 20 // a quarter of the memory is set aside for it, and it borrows a quarter of the other half
	for ; waits < 2*may/len(packed) && len(w.out) == 0; waits++ {
		last = w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Keys: packed}}})
		w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Release{}})
	}
	if a := <-w.out; a.GetError().GetCode() != proto.Code_CODE_LIMIT || a.Id > last+1 {
		t.Fatalf("after %d: %v", waits, a)
	}
	if n := x.share.Held(); n > may || n < may/2 {
		t.Fatalf("the session holds %d bytes", n)
	}
	w.say(cancelOf(job))
	until(t, "all that waits is handled", func() bool { return x.inbox.Waiting() == 0 })
	until(t, "the memory is given back", func() bool { return x.share.Held() < 1<<20 })
	testenv.OK(t, w.close())
}

// CANCEL and AWAIT_COPIES that wait are bounded as jobs are.
func TestWaitersAreBounded(t *testing.T) {
	b := &fakeStore{hold: make(chan struct{})}
	s := fakeServer(t, Config{Limits: Limits{Jobs: 2}}, b)
	w := newTalk(t, s, greeting("a"))
	pagesFor(t, only(s))
	job := w.say(storeOf(1))
	await := func(jobs ...uint64) *proto.SessionRequest {
		return &proto.SessionRequest{Body: &proto.SessionRequest_AwaitCopies{AwaitCopies: &proto.AwaitCopies{Jobs: jobs}}}
	}
	if e := w.ask(await(job, job, job)).GetError(); e.GetCode() != proto.Code_CODE_LIMIT || e.GetField() != "jobs" {
		t.Fatal(e)
	}
	waiting := []uint64{w.say(await()), w.say(await(job))}
	if e := w.ask(await()).GetError(); e.GetCode() != proto.Code_CODE_LIMIT {
		t.Fatal(e)
	}
	cancel := w.say(cancelOf(job)) // never refused where nothing is to be waited for
	done := map[uint64]bool{}
	for len(done) < 3 {
		if a := <-w.out; a.GetDone() != nil {
			done[a.Id] = true
		} else if a.Id != job {
			t.Fatal(a)
		}
	}
	if !done[cancel] || !done[waiting[0]] || !done[waiting[1]] {
		t.Fatalf("done: %v", done)
	}
	testenv.OK(t, w.close())
}

// A queue is never given up, so what a client says of its device makes none.
func TestUnknownDevicesMakeNoQueues(t *testing.T) {
	s := fakeServer(t, Config{}, &fakeStore{})
	for i := range 3 {
		m := greeting("a")
		m.GetHello().DeviceUuid = fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d", i)
		testenv.OK(t, newTalk(t, s, m).close())
	}
	if queues := s.cfg.Engine.Queues(); len(queues) != 1 || queues[0].Device != "" {
		t.Fatalf("queues %+v", queues)
	}
}
