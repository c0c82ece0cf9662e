package socket

import (
	"log/slog"
	"net"
	"os"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
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
