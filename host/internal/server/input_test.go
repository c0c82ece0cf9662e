package server

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func TestWrongInputIsAnsweredByField(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.KeysPerLookup, c.Limits.ChunksPerJob = 8, 4 })
	p := r.dial(nil)
	p.save(0, 2)
	w := r.raw()
	w.say(greeting("e"))
	lookup := func(m *proto.Lookup) *proto.SessionRequest {
		return &proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: m}}
	}
	load := func(m *proto.Load) *proto.SessionRequest {
		return &proto.SessionRequest{Body: &proto.SessionRequest_Load{Load: m}}
	}
	save := func(m *proto.Store) *proto.SessionRequest {
		return &proto.SessionRequest{Body: &proto.SessionRequest_Store{Store: m}}
	}
	packed := proto.PackKeys(keys(2), 32)
	one := key(0)
	chunks := []*proto.StoreChunk{{Key: one[:], Blocks: []uint32{0, 1}}}
	for name, c := range map[string]struct {
		m     *proto.SessionRequest
		code  proto.Code
		field string
	}{
		"no body":                    {&proto.SessionRequest{}, proto.Code_CODE_INVALID, "body"},
		"id again":                   {&proto.SessionRequest{Id: 1, Body: &proto.SessionRequest_Ping{}}, proto.Code_CODE_INVALID, "id"},
		"second hello":               {greeting("e"), proto.Code_CODE_INVALID, "hello"},
		"lookup group":               {lookup(&proto.Lookup{Group: 4}), proto.Code_CODE_UNKNOWN, "group"},
		"key length":                 {lookup(&proto.Lookup{Keys: packed[:63]}), proto.Code_CODE_INVALID, "keys"},
		"zero key":                   {lookup(&proto.Lookup{Keys: make([]byte, 32)}), proto.Code_CODE_INVALID, "keys"},
		"keys":                       {lookup(&proto.Lookup{Keys: make([]byte, 9*32)}), proto.Code_CODE_LIMIT, "keys"},
		"first":                      {lookup(&proto.Lookup{Keys: packed, First: 3}), proto.Code_CODE_INVALID, "first"},
		"readers":                    {lookup(&proto.Lookup{Keys: packed, Readers: 2}), proto.Code_CODE_INVALID, "readers"},
		"nil lookup":                 {&proto.SessionRequest{Body: &proto.SessionRequest_Lookup{}}, 0, ""},
		"release":                    {&proto.SessionRequest{Body: &proto.SessionRequest_Release{Release: &proto.Release{Lease: 77}}}, proto.Code_CODE_UNKNOWN, "lease"},
		"release none":               {&proto.SessionRequest{Body: &proto.SessionRequest_Release{}}, proto.Code_CODE_UNKNOWN, "lease"},
		"load nothing":               {load(&proto.Load{}), proto.Code_CODE_INVALID, "chunks"},
		"load lease":                 {load(&proto.Load{Lease: 77, Chunks: []*proto.LoadChunk{{}}}), proto.Code_CODE_UNKNOWN, "lease"},
		"load chunks":                {load(&proto.Load{Chunks: make([]*proto.LoadChunk, 5)}), proto.Code_CODE_LIMIT, "chunks"},
		"store unmapped":             {save(&proto.Store{Chunks: chunks}), proto.Code_CODE_UNKNOWN, "group"},
		"store group":                {save(&proto.Store{Group: 4, Chunks: chunks}), proto.Code_CODE_UNKNOWN, "group"},
		"cancel never sent":          {&proto.SessionRequest{Body: &proto.SessionRequest_Cancel{Cancel: &proto.Cancel{Job: 1 << 40}}}, proto.Code_CODE_UNKNOWN, "job"},
		"cancel nothing":             {&proto.SessionRequest{Body: &proto.SessionRequest_Cancel{}}, proto.Code_CODE_UNKNOWN, "job"},
		"copies of a job never sent": {&proto.SessionRequest{Body: &proto.SessionRequest_AwaitCopies{AwaitCopies: &proto.AwaitCopies{Jobs: []uint64{1 << 40}}}}, proto.Code_CODE_UNKNOWN, "jobs[0]"},
		"unregister":                 {&proto.SessionRequest{Body: &proto.SessionRequest_Unregister{Unregister: &proto.Unregister{Group: 5}}}, proto.Code_CODE_UNKNOWN, "group"},
		"register nothing":           {&proto.SessionRequest{Body: &proto.SessionRequest_Register{}}, proto.Code_CODE_INVALID, "regions"},
		"end unknown":                {&proto.SessionRequest{Body: &proto.SessionRequest_EndRequest{EndRequest: &proto.EndRequest{Request: 12345}}}, 0, ""},
		"nil ping":                   {&proto.SessionRequest{Body: &proto.SessionRequest_Ping{}}, 0, ""},
	} {
		a := w.say(c.m)
		if e := a.GetError(); e.GetCode() != c.code || e.GetField() != c.field {
			t.Errorf("message with %s: got %v", name, a)
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
		testenv.OK(t, err)
		_, err = job.Published(t.Context())
		var refused *client.HostError
		if !errors.As(err, &refused) || refused.Field != c.field {
			t.Errorf("register with %s: got %v", name, err)
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
		testenv.OK(t, err)
		_, err = job.Wait(t.Context())
		var refused *client.HostError
		if !errors.As(err, &refused) || refused.Field != c.field {
			t.Errorf("store with %s: got %v", name, err)
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

func TestSessionLimits(t *testing.T) {
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
	testenv.NoError(t, p.EndRequest(t.Context(), 1, client.Hints{}))
	if err := look(2); err != nil {
		t.Errorf("after the end of the first: %v", err)
	}
	if _, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(3000)}); !errors.Is(err, client.ErrLimit) {
		t.Errorf("message: %v", err)
	}
	testenv.OK(t, q.regs[0].Unregister(t.Context()))
	big, err := q.NewArena(3 * planes * arenaBlocks * pageBytes)
	testenv.OK(t, err)
	defer big.Close()
	if _, err := q.Register(t.Context(), 0, big, make([]client.PlaneRegion, planes)); !errors.Is(err, client.ErrLimit) {
		t.Errorf("arena: %v", err)
	}
	job := p.loadsHanging(r, 1)
	if _, err := p.store([]client.StoreChunk{chunkOf(3, 3)}); !errors.Is(err, client.ErrLimit) {
		t.Errorf("jobs: %v", err)
	}
	r.faults.Release()
	p.loaded(job)
}

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
		"model": {func(h *client.Hello) { h.Namespace.Model = "other" }, client.ErrDisagreement,
			[]string{"namespace", "model", `"other"`, `"test"`}},
		"replicated": {func(h *client.Hello) { h.Namespace.Replicated = true }, client.ErrDisagreement,
			[]string{"replicated", `"true"`, `"false"`}},
		"geometry": {func(h *client.Hello) { h.Namespace.Groups[0].Geometry.Blocks++ }, client.ErrDisagreement,
			[]string{"group.0", "blocks=3", "blocks=2"}},
		"pin": {func(h *client.Hello) { h.Engine, h.Namespace.DType = "f", "fp8" }, client.ErrDisagreement,
			[]string{"dtype", `"fp8"`, `"bf16"`}},
		"rank":      {func(h *client.Hello) { h.Rank = 4 }, client.ErrInvalid, []string{"rank", "4"}},
		"too many":  {func(h *client.Hello) { h.LocalRanks = 3; h.Rank = 3 }, client.ErrInvalid, []string{"local_ranks", "3"}},
		"no engine": {func(h *client.Hello) { h.Engine = "" }, client.ErrInvalid, []string{"engine"}},
		"role":      {func(h *client.Hello) { h.Role = "a\nb" }, client.ErrInvalid, []string{"role"}},
	} {
		h := r.hello()
		h.LocalRanks, h.Namespace.TensorParallel = 2, 4
		c.change(&h)
		s, err := client.Dial(t.Context(), h)
		if err == nil {
			s.Close()
		}
		if !errors.Is(err, c.is) {
			t.Errorf("HELLO with a bad %s: got %v", name, err)
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
	stream grpc.BidiStreamingClient[proto.SessionRequest, proto.SessionResponse]
	id     uint64
}

func (r *rig) raw() *raw {
	t := r.t.(*testing.T)
	conn, err := grpc.NewClient("unix:"+r.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.OK(t, err)
	t.Cleanup(func() { conn.Close() })
	st, err := proto.NewEngineServiceClient(conn).Session(t.Context())
	testenv.OK(t, err)
	return &raw{t: t, conn: conn, stream: st}
}

func (w *raw) say(m *proto.SessionRequest) *proto.SessionResponse {
	w.t.Helper()
	if m.Id == 0 {
		w.id++
		m.Id = w.id
	}
	testenv.OK(w.t, w.stream.Send(m))
	a, err := w.stream.Recv()
	testenv.OK(w.t, err)
	if a.Id != m.Id {
		w.t.Fatalf("answer to %d, want %d", a.Id, m.Id)
	}
	return a
}

func TestFirstMessageIsHello(t *testing.T) {
	r := newRig(t, nil)
	other := r.dial(nil)
	bad := greeting("e")
	bad.GetHello().Protocol = 99
	for name, m := range map[string]*proto.SessionRequest{
		"lookup":      {Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{}}},
		"store":       {Body: &proto.SessionRequest_Store{Store: &proto.Store{}}},
		"protocol":    bad,
		"empty hello": {Body: &proto.SessionRequest_Hello{}},
		"nil name space": {Body: &proto.SessionRequest_Hello{Hello: &proto.Hello{Protocol: 1, Engine: "x",
			LocalRanks: 1}}},
	} {
		w := r.raw()
		if a := w.say(m); a.GetError().GetCode() != proto.Code_CODE_INVALID {
			t.Errorf("HELLO with %s: got %v, want INVALID", name, a)
		}
		if _, err := w.stream.Recv(); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: the stream goes on: %v", name, err)
		}
	}
	testenv.NoError(t, other.Ping(t.Context()))
}

func TestSilenceIsNoHello(t *testing.T) {
	silent := newRig(t, func(c *Config, _ *store.Config) { c.HelloTimeout = 30 * time.Millisecond }).raw()
	if _, err := silent.stream.Recv(); err == nil || !strings.Contains(err.Error(), "HELLO") {
		t.Errorf("silence: %v", err)
	}
}

// What storage and devices do wrong has a code of its own: INTERNAL is for what is a mistake of the host's.
func TestCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want proto.Code
	}{
		{kv.ErrChecksum, proto.Code_CODE_DAMAGED},
		{transfer.ErrDamaged, proto.Code_CODE_DAMAGED},
		{store.ErrGone, proto.Code_CODE_DAMAGED},
		{transfer.ErrDevice, proto.Code_CODE_IO},
		{&staging.HungError{Op: staging.OpRead}, proto.Code_CODE_IO},
		{&gds.HungError{}, proto.Code_CODE_IO},
		{store.ErrRootOut, proto.Code_CODE_IO},
		{&fs.PathError{Op: "read", Err: errors.New("input/output error")}, proto.Code_CODE_IO},
		{transfer.ErrCancelled, proto.Code_CODE_CANCELLED},
		{transfer.ErrBlocks, proto.Code_CODE_INVALID},
		{transfer.ErrClosed, proto.Code_CODE_CLOSING},
		{errors.New("a bug"), proto.Code_CODE_INTERNAL},
	} {
		if got := codeOf(fmt.Errorf("chunk 3: %w", c.err)); got != c.want {
			t.Errorf("code of %v: got %s, want %s", c.err, got, c.want)
		}
	}
}
