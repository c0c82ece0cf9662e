package arrivals

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
)

const (
	frameBytes = 128 // memory that gRPC takes for a frame in addition to its bytes
	fewFrames  = 4   // number of frames that any message may have; each perFrame bytes of it allow one more
	perFrame   = 512
)

// Estimates of the processor time that arrivals take, with gRPC's own work for them.
const (
	callTime   = 25 * time.Microsecond
	frameTime  = 500 * time.Nanosecond
	mostAtOnce = 8 << 10 // bytes of a connection's first read, and of one after a read that was charged
)

// A frame of data that the server sends lets the client send freeFrames that belong to no message, as they follow from it: window
// updates and pings. At most mostFree of them are saved up.
const (
	freeFrames = 4
	mostFree   = 256
)

// whole returns the charge for a message that has arrived completely. It is at least as much as the message was charged while
// it arrived.
func whole(size int64) int64 { return size + size*frameBytes/perFrame + (fewFrames+1)*frameBytes }

// LargestMessage returns the size of the largest message that fits a share.
func LargestMessage(share int64) int {
	return int(max(0, share-(fewFrames+1)*frameBytes) * perFrame / (perFrame + frameBytes))
}

// Conn is the server's end of a connection. It bounds the memory that the connection makes the host hold before a handler has
// read it: partial messages, and whole messages that wait. Handlers see whole messages only, so Conn follows the frames. Bytes
// and frames are charged to the connection's share of a budget. A connection that exceeds its share is closed, and its last
// frame gives the reason. Conn is safe for one reader and one writer.
type Conn struct {
	net.Conn
	holder  *budget.Holder
	call    int64 // bytes charged for a call until the server ends it
	refused func(error)

	effort   *Effort // nil: arrivals are not limited
	sender   func() Sender
	byteTime time.Duration // estimated processor time of a byte
	wary     bool          // the latest read was charged
	lasts    context.Context
	ends     context.CancelFunc

	mu      sync.Mutex
	in      frames
	current *message            // message of the current frame
	data    int                 // bytes of the frame that have not arrived, without padding
	padded  bool                // the next byte is the length of the frame's padding
	partial map[uint32]*message // by stream
	unread  int64               // bytes of whole messages that no handler has read
	calls   int                 // running calls
	last    uint32              // latest stream that the client has opened
	open    map[uint32]bool     // streams that neither side has ended; true after the first message
	answers []int64             // charges of answers that may not be written yet, oldest first
	closed  bool
	took    time.Duration // estimated processor time that is not charged yet
	brought bool          // the frame has brought bytes of a message
	free    int           // frames of no message that are not charged

	writing sync.Mutex
	out     frames
}

// message is a message that has not arrived completely.
type message struct {
	head    [5]byte // flags (1 byte) and length
	got     int     // bytes of head that have arrived
	size    int64   // length according to head
	have    int64   // bytes after head that have arrived
	frames  int64
	counted bool // the current frame is counted
	charged int64
}

// New charges a connection to a share, with the given bytes for each call. It calls refused with the reason before it closes a
// connection that exceeds its share.
func New(c net.Conn, holder *budget.Holder, call int64, refused func(error)) *Conn {
	return &Conn{Conn: c, holder: holder, call: call, refused: refused, in: frames{skip: preface}, partial: map[uint32]*message{},
		open: map[uint32]bool{}}
}

// Pace charges to a sender the estimated processor time of what arrives, and has reads wait for it. The first message of a call is
// charged, and so are calls, messages that no handler gets, and frames of no message. Later messages that a handler gets are not: the
// handler knows more about them. Pace must be called before the first read.
func (c *Conn) Pace(effort *Effort, byteTime time.Duration, sender func() Sender) {
	c.effort, c.byteTime, c.sender, c.wary = effort, byteTime, sender, true
	c.lasts, c.ends = context.WithCancel(context.Background())
}

// Holder returns the share to which the connection is charged.
func (c *Conn) Holder() *budget.Holder { return c.holder }

// Read reads from the connection and charges the bytes that have arrived.
func (c *Conn) Read(p []byte) (int, error) {
	if c.wary {
		p = p[:min(len(p), mostAtOnce)]
	}
	n, err := c.Conn.Read(p)
	if n == 0 {
		return n, err
	}
	c.mu.Lock()
	refusal := c.in.feed(p[:n], (*arrival)(c))
	c.mu.Unlock()
	c.wary = c.spend()
	if refusal != nil {
		c.refused(refusal)
		c.explain(refusal)
		c.Close()
		return 0, refusal
	}
	return n, err
}

// spend charges what is not charged yet. It reports whether there was any.
func (c *Conn) spend() bool {
	c.mu.Lock()
	took := c.took
	c.took = 0
	c.mu.Unlock()
	if c.effort == nil || took == 0 {
		return false
	}
	c.effort.Spend(c.lasts, c.sender(), took)
	return true
}

// arrival follows the arriving frames of a connection. The connection's mutex must be held.
type arrival Conn

func (c *arrival) begin() error {
	c.current, c.data, c.padded, c.brought = nil, 0, false, false
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

// payload charges a part of a frame to the messages that it belongs to.
func (c *arrival) payload(p []byte) error {
	m := c.current
	if m == nil {
		return nil
	}
	if c.padded { // the first byte is the number of padding bytes at the end
		c.padded = false
		c.data = max(0, c.data-1-int(p[0]))
		p = p[1:]
	}
	p = p[:min(len(p), c.data)]
	c.data -= len(p)
	for len(p) > 0 {
		c.brought = true
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
		ends = ends || m.frames == 0 // nothing of the next message has arrived
	}
	if m := c.partial[c.in.stream()]; ends && m != nil {
		c.drop(m.charged)
		delete(c.partial, c.in.stream())
	}
	switch {
	case c.brought: // charged with its message
	case c.in.kind() == kindHeaders:
		c.took += callTime + frameTime
	case c.free > 0:
		c.free--
	default:
		c.took += frameTime + time.Duration(c.in.length())*c.byteTime
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
		c.open[c.last] = false
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

// drop returns the charge of what no handler gets.
func (c *arrival) drop(n int64) {
	c.give(n)
	c.took += time.Duration(n) * c.byteTime
}

// arrived records that a message is complete, and that the next one begins.
func (c *arrival) arrived(m *message) error {
	size := whole(m.size)
	if err := c.take(m, size-m.charged); err != nil {
		return err
	}
	c.unread += size
	if later, is := c.open[c.in.stream()]; !later {
		c.took += time.Duration(m.frames)*frameTime + time.Duration(size)*c.byteTime
		if is {
			c.open[c.in.stream()] = true
		}
	}
	*m = message{}
	return nil
}

// called records that a call begins.
func (c *Conn) called() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
}

// received records that a handler has got a message of the given size.
func (c *Conn) received(size int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(c.unread, whole(int64(size)))
	c.unread -= n
	(*arrival)(c).give(n)
}

// ended records that a call has ended. If it was the last one, no handler will read the messages that wait.
func (c *Conn) ended() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls--; c.calls == 0 {
		(*arrival)(c).drop(c.unread)
		c.unread = 0
	}
}

// Answer charges an answer to the connection until the answer is written or no longer wanted. gRPC keeps answers that the
// client does not read. Answers are written roughly in order, and the stream of a waiting answer is open. So the oldest charge
// is released when there are more charges than open streams.
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

// over records the end of a stream. The mutex must be held.
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

// Write writes to the connection, and records the ends of frames and of streams.
func (c *Conn) Write(p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	n, err := c.Conn.Write(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.out.feed(p[:n], (*departure)(c))
	return n, err
}

// departure follows the departing frames of a connection. The connection's mutexes must be held.
type departure Conn

func (*departure) payload([]byte) error { return nil }

func (c *departure) begin() error {
	if c.out.kind() == kindData {
		c.free = min(c.free+freeFrames, mostFree)
	}
	return nil
}

func (c *departure) end() error {
	if k := c.out.kind(); k == kindReset || (k == kindData || k == kindHeaders) && c.out.flags()&flagEndStream != 0 {
		(*Conn)(c).over(c.out.stream())
	}
	return nil
}

// explain sends the client the reason for closing the connection, unless a frame is half written.
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
		(*arrival)(c).drop(c.unread)
		for _, m := range c.partial {
			(*arrival)(c).drop(m.charged)
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
	if c.effort != nil {
		c.ends()
		c.spend()
	}
	return c.Conn.Close()
}
