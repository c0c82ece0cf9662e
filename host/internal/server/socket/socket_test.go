package socket

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

func TestOtherUsersAreRefused(t *testing.T) {
	dir, err := os.MkdirTemp(testenv.ShortTemp(), "kv")
	testenv.OK(t, err)
	defer os.RemoveAll(dir)
	l, err := listenUnix(dir+"/s", Users{}, slog.New(slog.DiscardHandler))
	testenv.OK(t, err)
	defer l.Close()
	peers := make(chan uint32, 3)
	peers <- uint32(os.Geteuid()) + 1
	peers <- uint32(os.Geteuid()) + 2
	peers <- uint32(os.Geteuid())
	l.peer = func(c *net.UnixConn) (Peer, error) {
		if p, err := peerOf(c); err != nil || p.UID != uint32(os.Geteuid()) || p.Groups[0] != uint32(os.Getegid()) {
			t.Errorf("the real peer is %+v, %v", p, err)
		}
		return Peer{UID: <-peers}, nil
	}
	got := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		got <- c
	}()
	for i := range 3 {
		c, err := net.Dial("unix", dir+"/s")
		testenv.OK(t, err)
		defer c.Close()
		if i < 2 {
			if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Errorf("connection %d is open", i)
			}
		}
	}
	(<-got).Close()
}

// Users are allowed by their number, or by any of their groups.
func TestUsers(t *testing.T) {
	u := Users{UIDs: []uint32{1001}, GIDs: []uint32{50}}
	for _, c := range []struct {
		peer Peer
		may  bool
	}{
		{Peer{UID: 0}, true}, {Peer{UID: uint32(os.Geteuid())}, true}, {Peer{UID: 1001}, true},
		{Peer{UID: 4001, Groups: []uint32{7, 50}}, true}, {Peer{UID: 4001, Groups: []uint32{7, 1001}}, false}, {Peer{UID: 50}, false},
	} {
		if u.Allow(c.peer) != c.may {
			t.Errorf("peer %+v: allowed %t", c.peer, !c.may)
		}
	}
}

// Others reach the sockets only where the operator names some.
func TestModes(t *testing.T) {
	for mode, users := range map[os.FileMode]Users{0o600: {}, 0o666: {GIDs: []uint32{50}}} {
		dir, err := os.MkdirTemp(testenv.ShortTemp(), "kv")
		testenv.OK(t, err)
		defer os.RemoveAll(dir)
		p, err := Listen(dir+"/s", users, slog.New(slog.DiscardHandler))
		testenv.OK(t, err)
		defer p.Close()
		for _, name := range []string{"/s", "/s.fd"} {
			if info, err := os.Stat(dir + name); err != nil || info.Mode().Perm() != mode {
				t.Errorf("mode of socket %s: got %v, %v", name, info.Mode(), err)
			}
		}
	}
}

// input is a connection that is read in parts of a size.
type input struct {
	net.Conn
	data []byte
	part int
	sent bytes.Buffer
}

func (i *input) Read(p []byte) (int, error) {
	if len(i.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(i.part, len(p))], i.data)
	i.data = i.data[n:]
	return n, nil
}

func (i *input) Write(p []byte) (int, error)      { return i.sent.Write(p) }
func (i *input) SetWriteDeadline(time.Time) error { return nil }
func (i *input) Close() error                     { return nil }

func frame(kind, flags byte, stream uint32, payload ...byte) []byte {
	head := []byte{0, byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	return append(binary.BigEndian.AppendUint32(head, stream), payload...)
}

func room(t testing.TB, limit int64) *budget.Budget {
	t.Helper()
	b, err := budget.New(budget.Config{Of: "memory", Limit: limit, Holders: 1, Parts: []string{"arriving"}})
	testenv.OK(t, err)
	return b
}

// read takes all of a connection's bytes, and returns it with what refused them.
func read(t testing.TB, b *budget.Budget, part int, data ...[]byte) (*arrivals, *input, error) {
	t.Helper()
	h, err := b.Join("connection", 0)
	testenv.OK(t, err)
	in := &input{data: append(make([]byte, preface), bytes.Join(data, nil)...), part: part}
	var refusal error
	c := newArrivals(in, h, func(err error) { refusal = err })
	if _, err := io.Copy(io.Discard, struct{ io.Reader }{c}); err != nil && !errors.Is(err, refusal) {
		t.Fatal(err)
	}
	return c, in, refusal
}

// A part of a message is charged until its stream ends, and a whole one until it is received or no call is left.
func TestCharges(t *testing.T) {
	const one = frameBytes
	message := func(size, have byte) []byte { return append([]byte{0, 0, 0, 0, size}, make([]byte, have)...) }
	for name, c := range map[string]struct {
		data []byte
		want int64
	}{
		"nothing":                 {frame(kindData, 0, 1), 0},
		"half a head":             {frame(kindData, 0, 1, 0, 0, 0), one},
		"a part":                  {frame(kindData, 0, 1, message(100, 30)...), one + 30},
		"a part in two frames":    {append(frame(kindData, 0, 1, message(100, 30)...), frame(kindData, 0, 1, 1, 2, 3)...), 2*one + 33},
		"of an ended stream":      {frame(kindData, flagEndStream, 1, message(100, 30)...), 0},
		"ended by an empty frame": {append(frame(kindData, 0, 1, message(100, 30)...), frame(kindData, flagEndStream, 1)...), 0},
		"ended by trailers":       {append(frame(kindData, 0, 1, message(100, 30)...), frame(kindHeaders, flagEndStream, 1)...), 0},
		"reset":                   {append(frame(kindData, 0, 1, message(100, 30)...), frame(kindReset, 0, 1, 0, 0, 0, 8)...), 0},
		"another is reset":        {append(frame(kindData, 0, 1, message(100, 30)...), frame(kindReset, 0, 3, 0, 0, 0, 8)...), one + 30},
		"whole":                   {frame(kindData, 0, 1, message(30, 30)...), whole(30)},
		"two, and a part": {frame(kindData, 0, 1, append(append(message(30, 30), message(0, 0)...), message(9, 4)...)...),
			whole(30) + whole(0) + one + 4},
		"padding":        {frame(kindData, flagPadded, 1, append(append([]byte{7}, message(100, 30)...), make([]byte, 7)...)...), one + 30},
		"padding of all": {frame(kindData, flagPadded, 1, 255, 1, 2), 0},
		"other frames":   {frame(4, flagEndStream, 1, 1, 2, 3), 0},
	} {
		for _, part := range []int{1, 3, 1 << 20} {
			b := room(t, 1<<20)
			conn, _, refusal := read(t, b, part, c.data)
			if held := b.Figures(0).Held; held != c.want || refusal != nil {
				t.Errorf("%s, read by %d: %d, want %d; %v", name, part, held, c.want, refusal)
			}
			conn.Close()
			conn.Close()
			if f := b.Figures(0); f.Held != 0 || f.Holders != 0 {
				t.Errorf("%s: after the end %+v", name, f)
			}
		}
	}
	b := room(t, 1<<20)
	c, _, _ := read(t, b, 100, frame(kindData, 0, 1, append(message(30, 30), message(20, 20)...)...))
	c.Called()
	c.Called()
	c.Received(30)
	if held := b.Figures(0).Held; held != whole(20) {
		t.Errorf("after one was received: %d", held)
	}
	c.Over()
	c.Over()
	if held := b.Figures(0).Held; held != 0 {
		t.Errorf("without calls: %d", held)
	}
}

// A connection that exceeds its share, or cuts a message too small, is told why, but not within a frame.
func TestRefusals(t *testing.T) {
	big := append([]byte{0, 0, 1, 0, 0}, make([]byte, 30_000)...)
	_, in, err := read(t, room(t, 40<<10), 1000, frame(kindData, 0, 1, big...), frame(kindData, 0, 3, big...))
	if !errors.Is(err, budget.ErrShare) || !bytes.Contains(in.sent.Bytes(), []byte(err.Error())) || in.sent.Bytes()[3] != kindGoAway {
		t.Errorf("refused connection: got %v, and sent %q", err, in.sent.Bytes())
	}
	var small [][]byte
	for range fewFrames + 1 {
		small = append(small, frame(kindData, 0, 1, 0))
	}
	if _, _, err := read(t, room(t, 40<<10), 1000, small...); !errors.Is(err, errFrames) {
		t.Error(err)
	}
	b := room(t, 40<<10)
	h, err := b.Join("connection", 0)
	testenv.OK(t, err)
	in = &input{part: 100}
	c := newArrivals(in, h, func(error) {})
	for _, p := range [][]byte{frame(4, 0, 0), {0, 0, 5, 0}} {
		if _, err := c.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	c.explain(errors.New("too much"))
	if in.sent.Len() != headBytes+4 {
		t.Errorf("a text within a frame: %q", in.sent.Bytes())
	}
	if n := LargestMessage(1 << 20); whole(int64(n)) > 1<<20 || whole(int64(n)+8) <= 1<<20 {
		t.Errorf("%d is not the largest message", n)
	}
}

// Whatever comes, and however it is cut, the charge is the same, is no less than the bytes of messages that are not whole, and is
// given back.
func FuzzFrames(f *testing.F) {
	f.Add(uint8(1), frame(kindData, flagPadded, 1, 2, 0, 0, 0, 0, 9, 1, 2, 3))
	f.Add(uint8(7), append(frame(kindHeaders, 0, 1, 1, 2), frame(kindData, flagEndStream, 1, 0, 0, 0, 0, 1, 1)...))
	f.Fuzz(func(t *testing.T, part uint8, data []byte) {
		var held [2]int64
		var refused [2]bool
		for i, size := range []int{max(1, int(part)), 1 << 20} {
			b := room(t, 1<<14)
			c, _, err := read(t, b, size, data)
			held[i], refused[i] = b.Figures(0).Held, err != nil
			if held[i] > 1<<14 {
				t.Fatalf("%d bytes are charged", held[i])
			}
			c.Received(int(part))
			c.Close()
			if f := b.Figures(0); f.Held != 0 || f.Holders != 0 {
				t.Fatalf("figures after the end: got %+v, want none", f)
			}
		}
		if held[0] != held[1] || refused[0] != refused[1] {
			t.Fatalf("read by %d: %d, %t; at once: %d, %t", part, held[0], refused[0], held[1], refused[1])
		}
	})
}

func TestRules(t *testing.T) {
	r := Rules{
		{First: 7, Last: 7, UIDs: []uint32{1007}, Sessions: 2}, {First: 3, Last: 9, UIDs: []uint32{1003, 1004}, Private: true},
		{First: 0, Last: 1<<32 - 1, Sessions: 5},
	}
	for _, c := range []struct {
		uid, tenant uint32
		may         bool
	}{
		{1007, 7, true}, {1003, 7, false}, {1004, 3, true}, {1007, 4, false}, {0, 7, false},
		{1007, 0, false}, {1009, 10, false}, // no rule names them
	} {
		if r.Allow(c.uid, c.tenant) != c.may {
			t.Errorf("user %d, tenant %d: %t", c.uid, c.tenant, !c.may)
		}
	}
	if !r.Private(7) || r.Private(2) || r.Sessions(7) != 2 || r.Sessions(8) != 5 || len(r.Users()) != 3 {
		t.Errorf("rules of tenants: got private %t, %t, sessions %d, %d, users %d", r.Private(7), r.Private(2), r.Sessions(7), r.Sessions(8), r.Users())
	}
	if none := (Rules{{Last: 9, Sessions: 1}}); !none.Allow(77, 12) || none.isolates() {
		t.Error("without users any may be any tenant")
	}
}

// What changes the host is for the operator. So is what tells of all tenants, once they are kept apart.
func TestOperatorsCalls(t *testing.T) {
	as := func(uid uint32) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{AuthInfo: Peer{UID: uid}})
	}
	other := uint32(os.Geteuid()) + 1000
	apart := Rules{{First: 1, Last: 1, Private: true}}
	for _, c := range []struct {
		rules  Rules
		uid    uint32
		method string
		may    bool
	}{
		{nil, other, proto.EngineService_Session_FullMethodName, true}, {nil, other, proto.StatusService_Status_FullMethodName, true},
		{nil, other, proto.AdminService_SwapPolicy_FullMethodName, false}, {nil, 0, proto.AdminService_SwapPolicy_FullMethodName, true},
		{nil, uint32(os.Geteuid()), proto.AdminService_PromotePolicy_FullMethodName, true}, {nil, other, "/kvhost.v1.New/Call", false},
		{apart, other, proto.EngineService_Session_FullMethodName, true}, {apart, other, proto.EngineService_Events_FullMethodName, false},
		{apart, other, proto.StatusService_Status_FullMethodName, false}, {apart, 0, proto.EngineService_Events_FullMethodName, true},
	} {
		err := c.rules.check(as(c.uid), c.method)
		if c.may != (err == nil) || err != nil && status.Code(err) != codes.PermissionDenied {
			t.Errorf("user %d calls %s: %v", c.uid, c.method, err)
		}
	}
}
