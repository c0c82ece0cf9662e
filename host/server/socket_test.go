package server

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

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
