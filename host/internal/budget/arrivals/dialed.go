package arrivals

import (
	"context"
	"net"
	"sync"
	"time"
)

// largeFrame is a frame of data that is not charged at the client's end: it brings much for its head.
const largeFrame = 4 << 10

// Dialed is the client's end of a connection. Its reads wait for the estimated processor time of frames that do not follow from
// what the client sends.
type Dialed struct {
	net.Conn
	effort *Effort
	sender Sender
	lasts  context.Context
	ends   context.CancelFunc
	wary   bool // the latest read was charged

	mu      sync.Mutex
	in, out frames
	took    time.Duration
	free    int // frames that are not charged
}

// Dial returns the client's end of a connection. Frames that arrive are charged to the server, which sends them.
func Dial(c net.Conn, effort *Effort, server Sender) *Dialed {
	d := &Dialed{Conn: c, effort: effort, sender: server, out: frames{skip: preface}}
	d.lasts, d.ends = context.WithCancel(context.Background())
	return d
}

// Read reads from the connection, and waits.
func (d *Dialed) Read(p []byte) (int, error) {
	if d.wary {
		p = p[:min(len(p), mostAtOnce)]
	}
	n, err := d.Conn.Read(p)
	d.mu.Lock()
	_ = d.in.feed(p[:n], (*answers)(d))
	took := d.took
	d.took = 0
	d.mu.Unlock()
	if d.wary = took > 0; d.wary {
		d.effort.Spend(d.lasts, d.sender, took)
	}
	return n, err
}

// Write writes to the connection.
func (d *Dialed) Write(p []byte) (int, error) {
	d.mu.Lock()
	_ = d.out.feed(p, (*requests)(d))
	d.mu.Unlock()
	return d.Conn.Write(p)
}

// Close closes the connection.
func (d *Dialed) Close() error {
	d.ends()
	return d.Conn.Close()
}

// answers follows the arriving frames. The mutex must be held.
type answers Dialed

func (*answers) begin() error         { return nil }
func (*answers) payload([]byte) error { return nil }
func (d *answers) end() error {
	switch {
	case d.in.kind() == kindData && d.in.length() >= largeFrame:
	case d.free > 0:
		d.free--
	default:
		d.took += frameTime
	}
	return nil
}

// requests follows the departing frames. The mutex must be held.
type requests Dialed

func (*requests) begin() error         { return nil }
func (*requests) payload([]byte) error { return nil }
func (d *requests) end() error {
	if k := d.out.kind(); k == kindHeaders || k == kindData {
		d.free = min(d.free+freeFrames, mostFree)
	}
	return nil
}
