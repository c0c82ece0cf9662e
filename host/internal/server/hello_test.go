package server

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
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
