package socket

import (
	"context"
	"log/slog"
	"net"
	"os"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
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
// read takes all of a connection's bytes, and returns it with what refused them.
// A part of a message is charged until its stream ends, and a whole one until it is received or no call is left.
// A connection that exceeds its share, or cuts a message too small, is told why, but not within a frame.
// Whatever comes, and however it is cut, the charge is the same, is no less than the bytes of messages that are not whole, and is
// given back.
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
