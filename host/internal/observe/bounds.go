package observe

import (
	"container/list"
	"net"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
)

// Limits on the resources that many or slow clients can make the host hold.
const (
	readTimeout  = 10 * time.Second
	writeTimeout = 10 * time.Second // for an answer, from the end of the request's headers
	writeBuffer  = 32 << 10         // bytes of the kernel's buffer of a connection
	period       = time.Second      // time in which figures are read at most mostReadings times for all clients together
	mostReadings = 32
)

// listener accepts connections, a bounded number at a time.
type listener struct {
	net.Listener
	open *budget.Connections
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c.(*net.TCPConn).SetWriteBuffer(writeBuffer)
	client, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	return &conn{Conn: c, open: l.open, place: l.open.Add(c, client)}, nil
}

type conn struct {
	net.Conn
	open  *budget.Connections
	place *list.Element
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.open.Heard(c.place)
	}
	return n, err
}

func (c *conn) Close() error {
	c.open.Remove(c.place)
	return c.Conn.Close()
}

// shared returns a function that reads a value for all clients, at most mostReadings times in a period. Beyond that it returns
// the last value again.
func shared[T any](period time.Duration, read func() (T, error)) func() (T, error) {
	var mu sync.Mutex
	var began time.Time
	var n int
	var value T
	var err error
	return func() (T, error) {
		mu.Lock()
		defer mu.Unlock()
		if began.IsZero() || time.Since(began) >= period {
			began, n = time.Now(), 0
		}
		if n++; n <= mostReadings {
			value, err = read()
		}
		return value, err
	}
}
