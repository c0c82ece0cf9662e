package server

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/server/socket"
)

func TestSockets(t *testing.T) {
	r := newRig(t, nil)
	serve := func(path string) error {
		ctx := testenv.Context(t)
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
	if err := serve(r.socket); !errors.Is(err, socket.ErrInUse) || !strings.Contains(err.Error(), r.socket) {
		t.Errorf("in use: %v", err)
	}
	if err := socket.Free(r.socket, slog.New(slog.DiscardHandler)); !errors.Is(err, socket.ErrInUse) || strings.Contains(err.Error(), "\n") {
		t.Errorf("both sockets of a host are in use: %v, want one line", err)
	}
	if err := r.dial(nil).Ping(t.Context()); err != nil {
		t.Errorf("the first host suffers: %v", err)
	}
	for _, name := range []string{r.socket, r.socket + ".fd"} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode of %s: got %v, %v, want 0600", name, info.Mode(), err)
		}
	}

	foreign := r.dir + "/foreign"
	l, err := net.Listen("unix", foreign)
	testenv.OK(t, err)
	if err := serve(foreign); !errors.Is(err, socket.ErrInUse) {
		t.Errorf("somebody else's: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	if err := serve(foreign); err != nil {
		t.Errorf("stale: %v", err)
	}
	file := r.dir + "/file"
	os.WriteFile(file, []byte("precious"), 0o600)
	if err := serve(file); !errors.Is(err, socket.ErrPath) {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Error("the file was touched")
	}
	if err := serve(r.dir + "/none/s"); !errors.Is(err, socket.ErrPath) || !strings.Contains(err.Error(), "mkdir") {
		t.Errorf("no directory: %v", err)
	}
	if err := serve("/" + strings.Repeat("x", 110)); !errors.Is(err, socket.ErrPath) {
		t.Errorf("long: %v", err)
	}
}
