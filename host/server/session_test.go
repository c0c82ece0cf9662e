package server

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

func TestHelloIsRefusedByField(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Pins = map[string]string{"dtype": "bf16"} })
	r.dial(func(h *client.Hello) { h.LocalRanks, h.Namespace.TensorParallel = 2, 4 })
	for name, c := range map[string]struct {
		change func(*client.Hello)
		is     error
		says   []string
	}{
		"local ranks": {func(h *client.Hello) { h.LocalRanks = 4 }, client.ErrDisagreement, []string{"local_ranks", `"4"`, `"2"`}},
		"node":        {func(h *client.Hello) { h.Rank = 2 }, client.ErrDisagreement, []string{"rank", "2", "0"}},
		"tenant":      {func(h *client.Hello) { h.Tenant = 9 }, client.ErrDisagreement, []string{"tenant", `"9"`, `"0"`}},
		"model":       {func(h *client.Hello) { h.Namespace.Model = "other" }, client.ErrDisagreement, []string{"namespace", "model", `"other"`, `"test"`}},
		"replicated":  {func(h *client.Hello) { h.Namespace.Replicated = true }, client.ErrDisagreement, []string{"replicated", `"true"`, `"false"`}},
		"geometry":    {func(h *client.Hello) { h.Namespace.Groups[0].Geometry.Blocks++ }, client.ErrDisagreement, []string{"group.0", "blocks=3", "blocks=2"}},
		"pin":         {func(h *client.Hello) { h.Engine, h.Namespace.DType = "f", "fp8" }, client.ErrDisagreement, []string{"dtype", `"fp8"`, `"bf16"`}},
		"rank":        {func(h *client.Hello) { h.Rank = 4 }, client.ErrInvalid, []string{"rank", "4"}},
		"too many":    {func(h *client.Hello) { h.LocalRanks = 3; h.Rank = 3 }, client.ErrInvalid, []string{"local_ranks", "3"}},
		"no engine":   {func(h *client.Hello) { h.Engine = "" }, client.ErrInvalid, []string{"engine"}},
		"role":        {func(h *client.Hello) { h.Role = "a\nb" }, client.ErrInvalid, []string{"role"}},
	} {
		h := r.hello()
		h.LocalRanks, h.Namespace.TensorParallel = 2, 4
		c.change(&h)
		s, err := client.Dial(t.Context(), h)
		if err == nil {
			s.Close()
		}
		if !errors.Is(err, c.is) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, want := range c.says {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not say %q", name, err, want)
			}
		}
	}
	until(t, "refused sessions are gone", func() bool { return r.server.Stats().Sessions == 1 })
	// Another engine need not agree with this one, and a namespace never seen is no disagreement.
	r.dial(func(h *client.Hello) { h.Engine, h.Namespace.Model = "g", "another" })
}

// raw is a client that says what it likes.
type raw struct {
	t      *testing.T
	conn   *grpc.ClientConn
	stream grpc.BidiStreamingClient[proto.ClientMessage, proto.HostMessage]
	id     uint64
}

func (r *rig) raw() *raw {
	t := r.t.(*testing.T)
	conn, err := grpc.NewClient("unix:"+r.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	st, err := proto.NewHostClient(conn).Session(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return &raw{t: t, conn: conn, stream: st}
}

func (w *raw) say(m *proto.ClientMessage) *proto.HostMessage {
	w.t.Helper()
	if m.Id == 0 {
		w.id++
		m.Id = w.id
	}
	if err := w.stream.Send(m); err != nil {
		w.t.Fatal(err)
	}
	a, err := w.stream.Recv()
	if err != nil {
		w.t.Fatal(err)
	}
	if a.Id != m.Id {
		w.t.Fatalf("answer to %d, want %d", a.Id, m.Id)
	}
	return a
}

func (r *rig) greeting() *proto.ClientMessage {
	ns := testNamespace()
	return &proto.ClientMessage{Body: &proto.ClientMessage_Hello{Hello: &proto.Hello{
		Protocol: proto.Protocol, Engine: "e", LocalRanks: 1, Namespace: proto.FromNamespace(&ns),
	}}}
}

func TestFirstMessageIsHello(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.HelloTimeout = 30 * time.Millisecond })
	other := r.dial(nil)
	bad := r.greeting()
	bad.GetHello().Protocol = 99
	for name, m := range map[string]*proto.ClientMessage{
		"lookup":         {Body: &proto.ClientMessage_Lookup{Lookup: &proto.Lookup{}}},
		"store":          {Body: &proto.ClientMessage_Store{Store: &proto.Store{}}},
		"protocol":       bad,
		"empty hello":    {Body: &proto.ClientMessage_Hello{}},
		"nil name space": {Body: &proto.ClientMessage_Hello{Hello: &proto.Hello{Protocol: 1, Engine: "x", LocalRanks: 1}}},
	} {
		w := r.raw()
		if a := w.say(m); a.GetError().GetCode() != proto.Code_CODE_INVALID {
			t.Errorf("%s: %v", name, a)
		}
		if _, err := w.stream.Recv(); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: the stream goes on: %v", name, err)
		}
	}
	silent := r.raw()
	if _, err := silent.stream.Recv(); err == nil || !strings.Contains(err.Error(), "HELLO") {
		t.Errorf("silence: %v", err)
	}
	if err := other.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestWrongInputIsAnsweredByField(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.KeysPerLookup, c.Limits.ChunksPerJob = 8, 4 })
	p := r.dial(nil)
	p.save(0, 2)
	w := r.raw()
	w.say(r.greeting())
	lookup := func(m *proto.Lookup) *proto.ClientMessage {
		return &proto.ClientMessage{Body: &proto.ClientMessage_Lookup{Lookup: m}}
	}
	load := func(m *proto.Load) *proto.ClientMessage {
		return &proto.ClientMessage{Body: &proto.ClientMessage_Load{Load: m}}
	}
	save := func(m *proto.Store) *proto.ClientMessage {
		return &proto.ClientMessage{Body: &proto.ClientMessage_Store{Store: m}}
	}
	packed := proto.AppendKeys(nil, keys(2), 32)
	one := key(0)
	chunks := []*proto.StoreChunk{{Key: one[:], Blocks: []uint32{0, 1}}}
	for name, c := range map[string]struct {
		m     *proto.ClientMessage
		code  proto.Code
		field string
	}{
		"no body":           {&proto.ClientMessage{}, proto.Code_CODE_INVALID, "body"},
		"id again":          {&proto.ClientMessage{Id: 1, Body: &proto.ClientMessage_Ping{}}, proto.Code_CODE_INVALID, "id"},
		"second hello":      {r.greeting(), proto.Code_CODE_INVALID, "hello"},
		"lookup group":      {lookup(&proto.Lookup{Group: 4}), proto.Code_CODE_UNKNOWN, "group"},
		"key length":        {lookup(&proto.Lookup{Keys: packed[:63]}), proto.Code_CODE_INVALID, "keys"},
		"zero key":          {lookup(&proto.Lookup{Keys: make([]byte, 32)}), proto.Code_CODE_INVALID, "keys"},
		"keys":              {lookup(&proto.Lookup{Keys: make([]byte, 9*32)}), proto.Code_CODE_LIMIT, "keys"},
		"first":             {lookup(&proto.Lookup{Keys: packed, First: 3}), proto.Code_CODE_INVALID, "first"},
		"readers":           {lookup(&proto.Lookup{Keys: packed, Readers: 2}), proto.Code_CODE_INVALID, "readers"},
		"nil lookup":        {&proto.ClientMessage{Body: &proto.ClientMessage_Lookup{}}, 0, ""},
		"release":           {&proto.ClientMessage{Body: &proto.ClientMessage_Release{Release: &proto.Release{Lease: 77}}}, proto.Code_CODE_UNKNOWN, "lease"},
		"release none":      {&proto.ClientMessage{Body: &proto.ClientMessage_Release{}}, proto.Code_CODE_UNKNOWN, "lease"},
		"load nothing":      {load(&proto.Load{}), proto.Code_CODE_INVALID, "chunks"},
		"load lease":        {load(&proto.Load{Lease: 77, Chunks: []*proto.LoadChunk{{}}}), proto.Code_CODE_UNKNOWN, "lease"},
		"load chunks":       {load(&proto.Load{Chunks: make([]*proto.LoadChunk, 5)}), proto.Code_CODE_LIMIT, "chunks"},
		"store unmapped":    {save(&proto.Store{Chunks: chunks}), proto.Code_CODE_UNKNOWN, "group"},
		"store group":       {save(&proto.Store{Group: 4, Chunks: chunks}), proto.Code_CODE_UNKNOWN, "group"},
		"cancel never sent": {&proto.ClientMessage{Body: &proto.ClientMessage_Cancel{Cancel: &proto.Cancel{Job: 1 << 40}}}, proto.Code_CODE_UNKNOWN, "job"},
		"cancel nothing":    {&proto.ClientMessage{Body: &proto.ClientMessage_Cancel{}}, proto.Code_CODE_UNKNOWN, "job"},
		"flush never sent":  {&proto.ClientMessage{Body: &proto.ClientMessage_Flush{Flush: &proto.Flush{Jobs: []uint64{1 << 40}}}}, proto.Code_CODE_UNKNOWN, "jobs[0]"},
		"unregister":        {&proto.ClientMessage{Body: &proto.ClientMessage_Unregister{Unregister: &proto.Unregister{Group: 5}}}, proto.Code_CODE_UNKNOWN, "group"},
		"register nothing":  {&proto.ClientMessage{Body: &proto.ClientMessage_Register{}}, proto.Code_CODE_INVALID, "regions"},
		"end unknown":       {&proto.ClientMessage{Body: &proto.ClientMessage_EndRequest{EndRequest: &proto.EndRequest{Request: 12345}}}, 0, ""},
		"nil ping":          {&proto.ClientMessage{Body: &proto.ClientMessage_Ping{}}, 0, ""},
	} {
		a := w.say(c.m)
		if e := a.GetError(); e.GetCode() != c.code || e.GetField() != c.field {
			t.Errorf("%s: %v", name, a)
		}
	}

	// The same with pages registered, through the client.
	for name, c := range map[string]struct {
		chunk client.StoreChunk
		field string
	}{
		"few blocks":   {client.StoreChunk{Key: key(8), Blocks: []uint32{0}}, "chunks[0].blocks"},
		"out of range": {client.StoreChunk{Key: key(8), Blocks: []uint32{0, arenaBlocks}}, "chunks[0].blocks"},
		"hole":         {client.StoreChunk{Key: key(8), Blocks: []uint32{0, 0xffffffff}}, "chunks[0].blocks"},
		"zero key":     {client.StoreChunk{Blocks: blocks(0)}, "chunks[0].key"},
		"own parent":   {client.StoreChunk{Key: key(8), Parent: key(8), Blocks: blocks(0)}, "chunks[0].parent"},
	} {
		job, err := p.Store(t.Context(), 0, 0, []client.StoreChunk{c.chunk})
		if err != nil {
			t.Fatal(err)
		}
		_, err = job.Published(t.Context())
		var refused *client.HostError
		if !errors.As(err, &refused) || refused.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
		if rerr := job.Read(t.Context()); !errors.Is(rerr, err) {
			t.Errorf("%s: read: %v", name, rerr)
		}
	}
	for name, c := range map[string]struct {
		chunks []client.LoadChunk
		field  string
	}{
		"not granted":    {[]client.LoadChunk{{Index: 2, Blocks: blocks(0)}}, "chunks[0].index"},
		"far":            {[]client.LoadChunk{{Index: 1 << 30, Blocks: blocks(0)}}, "chunks[0].index"},
		"block twice":    {[]client.LoadChunk{{Index: 0, Blocks: []uint32{3, 3}}}, "chunks[0].blocks"},
		"across chunks":  {[]client.LoadChunk{{Index: 0, Blocks: blocks(0)}, {Index: 1, Blocks: []uint32{9, 1}}}, "chunks[1].blocks"},
		"out of range":   {[]client.LoadChunk{{Index: 0, Blocks: []uint32{0, arenaBlocks}}}, "chunks[0].blocks"},
		"too few blocks": {[]client.LoadChunk{{Index: 0}}, "chunks[0].blocks"},
	} {
		l := p.look(3)
		job, err := p.Load(t.Context(), l, c.chunks, client.LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = job.Wait(t.Context())
		var refused *client.HostError
		if !errors.As(err, &refused) || refused.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Errorf("%s: nothing was done, so the lease is there: %v", name, err)
		}
	}
	if st := r.server.Stats(); st.Leases != 0 || st.Jobs != 0 || st.Sessions != 2 {
		t.Errorf("left behind: %+v", st)
	}
	p.check(2)
}

// childSocket makes this test binary a client that stores, loads and waits to be killed.
const childSocket = "KVHOST_TEST_CHILD_SOCKET"

func TestMain(m *testing.M) {
	if socket := os.Getenv(childSocket); socket != "" {
		victim(socket)
		return
	}
	os.Exit(m.Run())
}

func victim(socket string) {
	ctx := context.Background()
	fail := func(err error) {
		if err != nil {
			println(err.Error())
			os.Exit(1)
		}
	}
	s, err := client.Dial(ctx, client.Hello{Socket: socket, Engine: "victim", Namespace: testNamespace()})
	fail(err)
	arena, err := s.NewArena(planes * arenaBlocks * pageBytes)
	fail(err)
	var regions []client.PlaneRegion
	for pl := range planes {
		regions = append(regions, client.PlaneRegion{Offset: base(0, pl), Stride: pageBytes, Blocks: arenaBlocks})
	}
	_, err = s.Register(ctx, 0, arena, regions)
	fail(err)
	l, err := s.Lookup(ctx, client.LookupRequest{Request: 1, Keys: keys(2)})
	fail(err)
	_, err = s.Lookup(ctx, client.LookupRequest{Request: 2, Keys: keys(2)}) // a lease that nobody ends
	fail(err)
	_, err = s.Load(ctx, l, []client.LoadChunk{{Index: 0, Blocks: blocks(0)}, {Index: 1, Blocks: blocks(1)}}, client.LoadOptions{})
	fail(err)
	_, err = s.Store(ctx, 3, 0, []client.StoreChunk{chunkOf(20, 2), chunkOf(21, 3)})
	fail(err)
	select {}
}

func TestKilledClientLeavesNothing(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	mapped, before := mappings(t), r.server.Stats()
	r.faults.Set(staging.Rule{Op: staging.OpRead | staging.OpWrite, Path: "*", Fault: staging.Fault{Hang: true}})
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childSocket+"="+r.socket)
	child.Stderr = os.Stderr
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if err := r.faults.AwaitHanging(t.Context(), 4); err != nil { // two loads and two stores
		t.Fatal(err)
	}
	if st := r.server.Stats(); st.Sessions != 2 || st.Leases != 1 || st.Jobs != 2 || mappings(t) != mapped+1 {
		t.Fatalf("%+v, %d mappings", st, mappings(t)-mapped)
	}
	child.Process.Kill()
	child.Wait()
	// The I/O under its jobs still hangs; its memory is gone from here all the same.
	until(t, "the session is gone", func() bool { return r.server.Stats().Sessions == 1 })
	if st := r.server.Stats(); st.Leases != 0 || st.Engines != 1 || st.ArenaBytes != before.ArenaBytes || mappings(t) != mapped {
		t.Fatalf("%+v, %d mappings", st, mappings(t)-mapped)
	}
	if err := p.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.faults.Release()
	r.faults.Set()
	until(t, "its jobs are over", func() bool { return r.server.Stats().Jobs == 0 })
	if list := r.temporaries(); len(list) != 0 {
		t.Fatalf("temporaries: %v", list)
	}
	p.check(2)
}

func TestClosedSessionCancelsItsJobs(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	r.faults.Set(staging.Rule{Op: staging.OpRead, Path: "*", Fault: staging.Fault{Hang: true}})
	job := p.loads(p.look(2), 2)
	if err := r.faults.AwaitHanging(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	p.Close()
	if _, err := job.Wait(t.Context()); !errors.Is(err, client.ErrClosed) {
		t.Errorf("%v", err)
	}
	if err := p.Ping(t.Context()); !errors.Is(err, client.ErrClosed) {
		t.Errorf("%v", err)
	}
	until(t, "all is given up", func() bool {
		st := r.server.Stats()
		return st.Sessions == 0 && st.Engines == 0 && st.Leases == 0 && st.ArenaBytes == 0
	})
}

func TestHostGoesDown(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	r.faults.Set(staging.Rule{Op: staging.OpRead, Path: "*", Fault: staging.Fault{Hang: true}})
	job := p.loads(p.look(2), 2)
	if err := r.faults.AwaitHanging(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.stop()
	<-p.Ended()
	// The load's last answer may have come through before the end; either way it has one.
	if res, err := job.Wait(t.Context()); err == nil && len(res.Failed) != 4 || err != nil && !errors.Is(err, client.ErrHostGone) {
		t.Errorf("%+v, %v", res, err)
	}
	if err := p.Ping(t.Context()); !errors.Is(err, client.ErrHostGone) {
		t.Errorf("%v", err)
	}
	r.faults.Release()
	if err := <-r.served; err != nil {
		t.Fatal(err)
	}
	r.served <- nil
	if _, err := client.Dial(t.Context(), r.hello()); !errors.Is(err, client.ErrHostGone) {
		t.Errorf("%v", err)
	}
	for _, name := range []string{r.socket, r.socket + ".fd", r.socket + ".lock"} {
		if _, err := os.Lstat(name); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
	if err := r.server.Serve(t.Context(), r.socket); !errors.Is(err, ErrClosing) {
		t.Errorf("%v", err)
	}
}

func TestSlowClientLosesItsSession(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.Outgoing, c.SlowTimeout = 16, 50*time.Millisecond })
	p := r.dial(nil)
	w := r.raw()
	w.say(r.greeting())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for id := uint64(2); ; id++ { // never reads
			if w.stream.Send(&proto.ClientMessage{Id: id, Body: &proto.ClientMessage_Ping{}}) != nil {
				return
			}
		}
	}()
	until(t, "the slow session ends", func() bool {
		if err := p.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		return r.server.Stats().Sessions == 1
	})
	w.conn.Close()
	<-ended
}

func TestLimits(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) {
		c.Limits.Sessions, c.Limits.Leases, c.Limits.Requests, c.Limits.Jobs = 2, 1, 1, 1
		c.Limits.SessionArena, c.Limits.MessageBytes = 2*planes*arenaBlocks*pageBytes, 64<<10
	})
	p, q := r.dial(nil), r.dial(nil)
	if _, err := client.Dial(t.Context(), r.hello()); err == nil || !strings.Contains(err.Error(), "2 sessions") {
		t.Errorf("sessions: %v", err)
	}
	p.save(0, 2)
	l := p.look(1)
	if _, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(1)}); !errors.Is(err, client.ErrLimit) {
		t.Errorf("leases: %v", err)
	}
	l.Release(t.Context())
	look := func(request uint32) error {
		l, err := p.Lookup(t.Context(), client.LookupRequest{Request: request, Keys: keys(1)})
		if err == nil {
			l.Release(t.Context())
		}
		return err
	}
	if err := errors.Join(look(1), look(1)); err != nil {
		t.Errorf("one request: %v", err)
	}
	if err := look(2); !errors.Is(err, client.ErrLimit) {
		t.Errorf("requests: %v", err)
	}
	if err := p.EndRequest(t.Context(), 1); err != nil {
		t.Error(err)
	}
	if err := look(2); err != nil {
		t.Errorf("after the end of the first: %v", err)
	}
	if _, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(3000)}); !errors.Is(err, client.ErrLimit) {
		t.Errorf("message: %v", err)
	}
	if err := q.regs[0].Unregister(t.Context()); err != nil {
		t.Fatal(err)
	}
	big, err := q.NewArena(3 * planes * arenaBlocks * pageBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer big.Close()
	if _, err := q.Register(t.Context(), 0, big, make([]client.PlaneRegion, planes)); !errors.Is(err, client.ErrLimit) {
		t.Errorf("arena: %v", err)
	}
	r.faults.Set(staging.Rule{Op: staging.OpRead, Path: "*", Fault: staging.Fault{Hang: true}})
	job := p.loads(p.look(1), 1)
	if err := r.faults.AwaitHanging(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if _, err := p.store([]client.StoreChunk{chunkOf(3, 3)}); !errors.Is(err, client.ErrLimit) {
		t.Errorf("jobs: %v", err)
	}
	r.faults.Release()
	p.loaded(job)
}

func TestSockets(t *testing.T) {
	r := newRig(t, nil)
	serve := func(path string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		s := New(Config{})
		go func() {
			select {
			case <-s.Ready():
				s.Close()
			case <-ctx.Done():
			}
		}()
		return s.Serve(ctx, path)
	}
	if err := serve(r.socket); !errors.Is(err, ErrSocketInUse) || !strings.Contains(err.Error(), r.socket) {
		t.Errorf("in use: %v", err)
	}
	if err := r.dial(nil).Ping(t.Context()); err != nil {
		t.Errorf("the first host suffers: %v", err)
	}
	for _, name := range []string{r.socket, r.socket + ".fd"} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}

	foreign := r.dir + "/foreign"
	l, err := net.Listen("unix", foreign)
	if err != nil {
		t.Fatal(err)
	}
	if err := serve(foreign); !errors.Is(err, ErrSocketInUse) {
		t.Errorf("somebody else's: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	if err := serve(foreign); err != nil {
		t.Errorf("stale: %v", err)
	}
	file := r.dir + "/file"
	os.WriteFile(file, []byte("precious"), 0o600)
	if err := serve(file); !errors.Is(err, ErrSocket) {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Error("the file was touched")
	}
	if err := serve(r.dir + "/none/s"); !errors.Is(err, ErrSocket) || !strings.Contains(err.Error(), "mkdir") {
		t.Errorf("no directory: %v", err)
	}
	if err := serve("/" + strings.Repeat("x", 110)); !errors.Is(err, ErrSocket) {
		t.Errorf("long: %v", err)
	}
}

func TestOtherUsersAreRefused(t *testing.T) {
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l, err := listenUnix(dir+"/s", Config{}.orDefaults().Log)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peers := make(chan uint32, 3)
	peers <- uint32(os.Geteuid()) + 1
	peers <- uint32(os.Geteuid()) + 2
	peers <- uint32(os.Geteuid())
	l.peer = func(c *net.UnixConn) (uint32, error) {
		if uid, err := peerUID(c); err != nil || uid != uint32(os.Geteuid()) {
			t.Errorf("the real peer is %d, %v", uid, err)
		}
		return <-peers, nil
	}
	got := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		got <- c
	}()
	for i := range 3 {
		c, err := net.Dial("unix", dir+"/s")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i < 2 {
			if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Errorf("connection %d is open", i)
			}
		}
	}
	(<-got).Close()
}
