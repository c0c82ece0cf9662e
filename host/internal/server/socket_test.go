package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/peerdouble"
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

// wire is a connection whose client writes HTTP/2 frames itself.
type wire struct {
	net.Conn
	t testing.TB
}

func (r *rig) wire() *wire {
	r.t.Helper()
	c, err := net.Dial("unix", r.socket)
	testenv.OK(r.t, err)
	r.t.Cleanup(func() { c.Close() })
	w := &wire{c, r.t}
	w.write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	w.frame(4, 0, 0, nil) // SETTINGS
	return w
}

// write reports whether the host still takes what the client writes.
func (w *wire) write(p []byte) bool {
	w.SetWriteDeadline(testenv.Deadline(w.t))
	_, err := w.Write(p)
	return err == nil
}

func (w *wire) frame(kind, flags byte, stream uint32, payload []byte) bool {
	head := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	return w.write(append(binary.BigEndian.AppendUint32(head, stream), payload...))
}

// call begins a call with HEADERS.
func (w *wire) call(stream uint32, method string) bool {
	var block []byte
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "localhost"},
		{"content-type", "application/grpc"}, {"te", "trailers"}} {
		block = append(block, 0, byte(len(h[0]))) // a literal that is not indexed
		block = append(append(append(block, h[0]...), byte(len(h[1]))), h[1]...)
	}
	return w.frame(1, 4, stream, block) // END_HEADERS
}

// begin sends a message's head, and its first bytes in frames of a size.
func (w *wire) begin(stream, message uint32, bytes, frame int) bool {
	payload := append(binary.BigEndian.AppendUint32([]byte{0}, message), make([]byte, bytes)...)
	for len(payload) > 0 {
		n := min(len(payload), frame)
		if !w.frame(0, 0, stream, payload[:n]) {
			return false
		}
		payload = payload[n:]
	}
	return true
}

// Parts of messages on many streams and connections take no more than their part of the memory, however they are cut into
// frames. The connections that exceed it are told why, others are served, and all is given back.
func TestPartsOfMessagesAreBounded(t *testing.T) {
	const limit, message, bytes, connections = 8 << 20, 800 << 10, 200 << 10, 16
	arriving := budget.OfArriving(limit, 32)
	r := newRig(t, func(c *Config, _ *store.Config) {
		c.Limits.Sessions, c.Limits.MessageBytes, c.Arriving = 32, message, arriving
	})
	p := r.dial(func(h *client.Hello) { h.Engine = "honest" })
	p.save(0, 4)
	before := heap()
	var list []*wire
	for range connections {
		w := r.wire()
		list = append(list, w)
		for i := range uint32(8) {
			method := []string{proto.EngineService_Session_FullMethodName, proto.StatusService_Status_FullMethodName}[i%2]
			if !w.call(2*i+1, method) || !w.begin(2*i+1, message, bytes, 16<<10) {
				break
			}
		}
	}
	until(t, "connections are closed", func() bool { return arriving.Figures(0).Refused > 0 })
	if f := arriving.Figures(0); f.Held > limit {
		t.Errorf("what arrives: got %+v, want it within the limit", f)
	}
	if grown := heap() - before; grown > 4*limit { // a session takes more than its messages, and some are refused late
		t.Errorf("%d MiB more are in use", grown>>20)
	}
	p.check(4)
	closed := 0
	for _, w := range list {
		w.SetReadDeadline(testenv.Deadline(t))
		_ = w.frame(6, 0, 0, make([]byte, 8)) // PING, whose answer ends what can be read
		text, err := readUntilPong(w)
		if err != nil && strings.Contains(text, "memory of connections") && strings.Contains(text, "max_memory") {
			closed++
		}
		w.Close()
	}
	if closed == 0 {
		t.Error("no connection was told why it is closed")
	}
	until(t, "all is given back", func() bool { return arriving.Figures(0).Held == 0 })

	w := r.wire()
	w.call(1, proto.EngineService_Session_FullMethodName)
	w.begin(1, message, 100, 1) // of one byte each
	w.SetReadDeadline(testenv.Deadline(t))
	if text, err := io.ReadAll(w); !strings.Contains(string(text), "frames are too small") {
		t.Errorf("connection with small frames: got %q, %v", text, err)
	}
	until(t, "all is given back", func() bool { return arriving.Figures(0).Held == 0 })
	p.check(4)
	many := keys(message/32 - 100) // nearly the largest message, ten times
	for range 10 {
		if _, err := p.Lookup(t.Context(), client.LookupRequest{Keys: many}); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "all is given back", func() bool { return arriving.Figures(0).Held == 0 })
}

// Answers that a client does not read are charged to its connection until they are written, not wanted any more or lost with
// the connection. Those that exceed the budget are refused.
func TestAnswersAreBounded(t *testing.T) {
	for how, over := range map[string]func(w *wire, stream uint32){
		"read":      func(w *wire, stream uint32) { w.frame(8, 0, stream, []byte{0, 1, 0, 0}) }, // WINDOW_UPDATE
		"reset":     func(w *wire, stream uint32) { w.frame(3, 0, stream, []byte{0, 0, 0, 8}) },
		"connected": func(w *wire, _ uint32) { w.Close() },
	} {
		arriving := budget.OfArriving(256<<10, 32)
		r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.Sessions, c.Arriving = 32, arriving })
		var list []*wire
		for len(list) < 32 && arriving.Figures(0).Refused == 0 {
			w := r.wire()
			list = append(list, w)
			w.frame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0}) // SETTINGS: streams have no window
			held := arriving.Figures(0).Parts["answers"]
			for i := range uint32(8) {
				w.call(2*i+1, proto.StatusService_Status_FullMethodName)
				w.frame(0, 1, 2*i+1, make([]byte, 5)) // an empty message, the last
			}
			until(t, "answers are charged", func() bool {
				f := arriving.Figures(0)
				return f.Parts["answers"] >= held+8*256 || f.Refused > 0
			})
		}
		if f := arriving.Figures(0); f.Refused == 0 || f.Held > f.Limit {
			t.Errorf("%s: %d connections with answers that are not read: %+v, want refusals within the limit", how, len(list), f)
		}
		for _, w := range list {
			for i := range uint32(8) {
				over(w, 2*i+1)
			}
		}
		until(t, "all answers are given back: "+how, func() bool { return arriving.Figures(0).Parts["answers"] == 0 })
	}
}

// readUntilPong reads frames until the answer to a PING, or the end.
func readUntilPong(r io.Reader) (text string, err error) {
	for {
		var head [9]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return text, err
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(r, payload); err != nil {
			return text, err
		}
		text += string(payload)
		if head[3] == 6 && head[4] == 1 {
			return text, nil
		}
	}
}

// TestFramesOfNoSession: connections, calls and frames that reach no session are charged to their process before gRPC sees them, and so are
// messages that cannot be decoded, the first of a call and later ones.
func TestFramesOfNoSession(t *testing.T) {
	nonsense := append([]byte{0, 0, 0, 100, 0}, bytes.Repeat([]byte{0xff}, 100<<8)...)
	settings := bytes.Repeat([]byte{0, 0, 0, byte(http2.FrameSettings), 0, 0, 0, 0, 0}, 1000)
	calls := func(message []byte) func(*peerdouble.Mute) bool {
		return func(m *peerdouble.Mute) bool {
			return m.Call(proto.EngineService_Session_FullMethodName, message, 15<<10)
		}
	}
	for what, attack := range map[string]func(*peerdouble.Mute) bool{
		"connections":                         func(*peerdouble.Mute) bool { return false },
		"settings":                            func(m *peerdouble.Mute) bool { _, err := m.Conn.Write(settings); return err == nil },
		"calls that are withdrawn":            func(m *peerdouble.Mute) bool { return calls(nil)(m) && m.Reset() },
		"messages that are none":              calls(nonsense),
		"messages that are none, after HELLO": calls(append(peerdouble.Framed(greeting("e")), nonsense...)),
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, nil)
			over, stop := context.WithCancel(t.Context())
			stop()
			ahead := func(pid int) time.Duration {
				return r.server.effort.Spend(over, arrivals.Sender{ID: fmt.Sprint("process ", pid), Crowd: fmt.Sprint("user ", os.Getuid())}, 0)
			}
			stopped := make(chan struct{})
			defer func() { <-stopped }()
			ctx, end := context.WithCancel(t.Context())
			defer end()
			go func() {
				defer close(stopped)
				for ctx.Err() == nil {
					c, err := net.Dial("unix", r.socket)
					if err != nil {
						t.Error(err)
						return
					}
					closed := context.AfterFunc(ctx, func() { _ = c.Close() })
					go func() { _, _ = io.Copy(io.Discard, c) }()
					for m := peerdouble.NewMute(c); attack(m); {
					}
					closed()
					_ = c.Close()
				}
			}()
			testenv.Until(t, "an attacker that waits", func() bool { return ahead(os.Getpid()) > 5*time.Millisecond })
			if n := ahead(os.Getppid()); n != 0 {
				t.Errorf("another process is ahead by %s, want by nothing", n)
			}
		})
	}
}
