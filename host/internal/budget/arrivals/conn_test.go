package arrivals

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget"
)

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
func read(t testing.TB, b *budget.Budget, part int, data ...[]byte) (*Conn, *input, error) {
	t.Helper()
	h, err := b.Join("connection", 0)
	testenv.OK(t, err)
	in := &input{data: append(make([]byte, preface), bytes.Join(data, nil)...), part: part}
	var refusal error
	c := New(in, h, 0, func(err error) { refusal = err })
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
	c.called()
	c.called()
	c.received(30)
	if held := b.Figures(0).Held; held != whole(20) {
		t.Errorf("after one was received: %d", held)
	}
	c.ended()
	c.ended()
	if held := b.Figures(0).Held; held != 0 {
		t.Errorf("without calls: %d", held)
	}
}

// TestPace: what arrives for no handler is charged to its sender, in whatever parts it comes, and so are calls with their first message.
func TestPace(t *testing.T) {
	const byteTime = 3 * time.Nanosecond
	done, stop := context.WithCancel(t.Context())
	stop()
	message := func(size, have int) []byte { return append([]byte{0, 0, 0, 0, byte(size)}, make([]byte, have)...) }
	call := frame(kindHeaders, 4, 1, 0x82)
	first := append(call, frame(kindData, 0, 1, message(30, 30)...)...)
	const callOf = callTime + frameTime
	var firstOf = callOf + frameTime + time.Duration(whole(30))*byteTime
	for what, c := range map[string]struct {
		data [][]byte
		want time.Duration
	}{
		"frames of no call":       {[][]byte{bytes.Repeat(frame(4, 0, 0), 1000)}, 1000 * frameTime},
		"an unknown frame":        {[][]byte{frame(0xee, 0, 0, 1, 2, 3)}, frameTime + 3*byteTime},
		"frames without data":     {[][]byte{bytes.Repeat(frame(kindData, 0, 1), 10), frame(kindData, flagPadded, 1, 2, 0, 0)}, 11*frameTime + 3*byteTime},
		"calls of nothing":        {[][]byte{call, frame(kindHeaders, 4, 3, 0x82)}, 2 * callOf},
		"a call that is none":     {[][]byte{call, frame(kindReset, 0, 1, 0, 0, 0, 8)}, callOf + frameTime + 4*byteTime},
		"a call":                  {[][]byte{first}, firstOf},
		"messages of it":          {[][]byte{first, bytes.Repeat(frame(kindData, 0, 1, message(30, 30)...), 10)}, firstOf},
		"a part, and the end":     {[][]byte{first, frame(kindData, flagEndStream, 1, message(30, 20)...)}, firstOf + (frameBytes+20)*byteTime},
		"a part, and the closing": {[][]byte{first, frame(kindData, 0, 1, message(30, 20)...)}, firstOf + (frameBytes+20)*byteTime},
	} {
		for _, part := range []int{1, 7, 1 << 20} {
			synctest.Test(t, func(t *testing.T) {
				h, err := room(t, 1<<20).Join("connection", 0)
				testenv.OK(t, err)
				in := &input{data: append(make([]byte, preface), bytes.Join(c.data, nil)...), part: part}
				conn := New(in, h, 0, func(err error) { t.Error(what, err) })
				e, who, since := &Effort{Part: 1}, Sender{ID: "one"}, time.Now()
				conn.Pace(e, byteTime, func() Sender { return who })
				_, err = io.Copy(io.Discard, struct{ io.Reader }{conn})
				testenv.OK(t, err)
				for range 11 {
					conn.received(30)
				}
				testenv.OK(t, conn.Close())
				if got := time.Since(since) + e.Spend(done, who, 0); got != c.want {
					t.Errorf("%s in parts of %d bytes: %s, want %s", what, part, got, c.want)
				}
			})
		}
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
	c := New(in, h, 0, func(error) {})
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
			c.received(int(part))
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
