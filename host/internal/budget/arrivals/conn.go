package arrivals

import (
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
)

const (
	frameBytes = 128 // what gRPC takes for a frame on top of its bytes
	fewFrames  = 4   // that a message may have, and one more for each so many bytes of it:
	perFrame   = 512
)

// whole is what a message takes once all of it is there: at least as much as it took while it came.
func whole(size int64) int64 { return size + size*frameBytes/perFrame + (fewFrames+1)*frameBytes }

// LargestMessage is the size of the largest message that takes no more than a share.
func LargestMessage(share int64) int {
	return int(max(0, share-(fewFrames+1)*frameBytes) * perFrame / (perFrame + frameBytes))
}

// Conn is the server's end of a connection. It bounds what the connection makes the host hold before a handler has read it:
// messages of which a part has come, and whole ones that wait. Handlers see whole messages only, so this follows the frames.
// Bytes and frames are charged to the connection's share of a budget, and a connection that exceeds it is closed, with the
// reason in its last frame. It is safe for one reader and one writer.
type Conn struct {
	net.Conn
	holder  *budget.Holder
	call    int64 // bytes that are charged for a call until the server ends it
	refused func(error)

	mu      sync.Mutex
	in      frames
	current *message            // that the current frame is of
	data    int                 // bytes of the frame that are to come, without padding
	padded  bool                // its first byte is not data
	partial map[uint32]*message // by stream
	unread  int64               // bytes of whole messages
	calls   int                 // that run
	last    uint32              // stream that the client has opened
	open    map[uint32]struct{} // streams that neither side has ended
	answers []int64             // what is charged of those that may not be written yet, oldest first
	closed  bool

	writing sync.Mutex
	out     frames
}

// message is one of which a part has come.
type message struct {
	head    [5]byte // a byte of flags, and the length
	got     int     // bytes of head
	size    int64   // as head says
	have    int64   // bytes after head
	frames  int64
	counted bool // the current frame is
	charged int64
}

// New charges a connection to a share, with so many bytes for each call, and tells of a refusal before it closes the connection.
func New(c net.Conn, holder *budget.Holder, call int64, refused func(error)) *Conn {
	return &Conn{Conn: c, holder: holder, call: call, refused: refused, in: frames{skip: preface}, partial: map[uint32]*message{},
		open: map[uint32]struct{}{}}
}

// Holder is who the connection is charged to.
func (c *Conn) Holder() *budget.Holder { return c.holder }

// Read reads, and charges what has come.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n == 0 {
		return n, err
	}
	c.mu.Lock()
	refusal := c.in.feed(p[:n], (*arrival)(c))
	c.mu.Unlock()
	if refusal != nil {
		c.refused(refusal)
		c.explain(refusal)
		c.Close()
		return 0, refusal
	}
	return n, err
}

// arrival is what a connection makes of the frames that come. The connection's mutex is held.
type arrival Conn

func (c *arrival) begin() error {
	c.current, c.data, c.padded = nil, 0, false
	if c.in.kind() != kindData {
		return nil
	}
	c.data, c.padded = c.in.length(), c.in.flags()&flagPadded != 0
	if c.data > 0 {
		if c.current = c.partial[c.in.stream()]; c.current == nil {
			c.current = &message{}
			c.partial[c.in.stream()] = c.current
		}
	}
	return nil
}

// payload charges a part of a frame to the messages that it is of.
func (c *arrival) payload(p []byte) error {
	m := c.current
	if m == nil {
		return nil
	}
	if c.padded { // the first byte says how many at the end are no data
		c.padded = false
		c.data = max(0, c.data-1-int(p[0]))
		p = p[1:]
	}
	p = p[:min(len(p), c.data)]
	c.data -= len(p)
	for len(p) > 0 {
		if !m.counted {
			m.counted = true
			m.frames++
			if err := c.take(m, frameBytes); err != nil {
				return err
			}
		}
		n := copy(m.head[m.got:], p)
		m.got, p = m.got+n, p[n:]
		if n > 0 && m.got == len(m.head) {
			m.size = int64(binary.BigEndian.Uint32(m.head[1:]))
		}
		n = int(min(m.size-m.have, int64(len(p))))
		m.have, p = m.have+int64(n), p[n:]
		if err := c.take(m, int64(n)); err != nil {
			return err
		}
		if m.frames > fewFrames+m.have/perFrame {
			return fmt.Errorf("%w: %d brought %d bytes of a message", errFrames, m.frames, m.have)
		}
		if m.got == len(m.head) && m.have == m.size {
			if err := c.arrived(m); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *arrival) end() error {
	ends := c.in.kind() == kindReset || (c.in.kind() == kindData || c.in.kind() == kindHeaders) && c.in.flags()&flagEndStream != 0
	if m := c.current; m != nil {
		m.counted = false
		ends = ends || m.frames == 0 // nothing of a next message has come
	}
	if m := c.partial[c.in.stream()]; ends && m != nil {
		c.give(m.charged)
		delete(c.partial, c.in.stream())
	}
	switch {
	case c.in.kind() == kindReset:
		(*Conn)(c).over(c.in.stream())
	case c.in.kind() == kindHeaders && c.in.stream() > c.last:
		c.last = c.in.stream()
		if c.call > 0 && !c.closed {
			if err := c.holder.Call(c.call); err != nil {
				return err
			}
		}
		c.open[c.last] = struct{}{}
	}
	return nil
}

func (c *arrival) take(m *message, n int64) error {
	if n == 0 || c.closed {
		return nil
	}
	if err := c.holder.Arrive(n); err != nil {
		return err
	}
	m.charged += n
	return nil
}

func (c *arrival) give(n int64) {
	if n > 0 && !c.closed {
		c.holder.ArriveOver(n)
	}
}

// arrived notes that a message is there, and that the next one begins.
func (c *arrival) arrived(m *message) error {
	size := whole(m.size)
	if err := c.take(m, size-m.charged); err != nil {
		return err
	}
	c.unread += size
	*m = message{}
	return nil
}

// called notes that a call begins.
func (c *Conn) called() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
}

// received notes that a handler has got a message of so many bytes.
func (c *Conn) received(size int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(c.unread, whole(int64(size)))
	c.unread -= n
	(*arrival)(c).give(n)
}

// ended notes that a call has ended. After the last one nothing waits that a handler will read.
func (c *Conn) ended() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls--; c.calls == 0 {
		(*arrival)(c).give(c.unread)
		c.unread = 0
	}
}

// Answer charges an answer to the connection, until it is written or not wanted any more. gRPC keeps what the client does not
// read. Answers are written in about their order, and the streams of those that wait are open: so the oldest charge goes when
// there are more charges than open streams.
func (c *Conn) Answer(size int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	if err := c.holder.Answer(size); err != nil {
		return err
	}
	c.answers = append(c.answers, size)
	c.settle()
	return nil
}

// over notes the end of a stream. The mutex is held.
func (c *Conn) over(stream uint32) {
	if _, is := c.open[stream]; is && c.call > 0 && !c.closed {
		c.holder.CallOver(c.call)
	}
	delete(c.open, stream)
	c.settle()
}

func (c *Conn) settle() {
	for len(c.answers) > len(c.open) {
		c.holder.AnswerOver(c.answers[0])
		c.answers = c.answers[1:]
	}
}

// Write writes, and notes where a frame ends, and a stream.
func (c *Conn) Write(p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	n, err := c.Conn.Write(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.out.feed(p[:n], (*departure)(c))
	return n, err
}

// departure is what a connection makes of the frames that go. The connection's mutexes are held.
type departure Conn

func (*departure) begin() error         { return nil }
func (*departure) payload([]byte) error { return nil }
func (c *departure) end() error {
	if k := c.out.kind(); k == kindReset || (k == kindData || k == kindHeaders) && c.out.flags()&flagEndStream != 0 {
		(*Conn)(c).over(c.out.stream())
	}
	return nil
}

// explain tells the client why the connection is closed, unless a frame is half written.
func (c *Conn) explain(reason error) {
	if !c.writing.TryLock() { // the client reads nothing
		return
	}
	defer c.writing.Unlock()
	if c.out.between() {
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = c.Conn.Write(goAway(reason.Error()))
	}
}

// Close closes the connection and releases its share.
func (c *Conn) Close() error {
	c.mu.Lock()
	if !c.closed {
		(*arrival)(c).give(c.unread)
		for _, m := range c.partial {
			(*arrival)(c).give(m.charged)
		}
		if c.call > 0 {
			c.holder.CallOver(c.call * int64(len(c.open)))
		}
		clear(c.open)
		c.settle()
		c.closed = true
		c.holder.Leave()
	}
	c.mu.Unlock()
	return c.Conn.Close()
}
