package peerdouble

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	protobuf "google.golang.org/protobuf/proto"
)

// Mute is a caller that sends and reads nothing.
type Mute struct {
	net.Conn
	*http2.Framer
	head   bytes.Buffer
	coder  *hpack.Encoder
	stream uint32
}

// DialFrom connects from an address of this machine.
func DialFrom(from, to string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	return d.Dial("tcp", to)
}

// NewMute says on a connection that it will call. The host may have closed it: calls say so.
func NewMute(c net.Conn) *Mute {
	m := &Mute{Conn: c, Framer: http2.NewFramer(c, c)}
	if _, err := io.WriteString(m, http2.ClientPreface); err == nil {
		_ = m.WriteSettings()
	}
	m.coder = hpack.NewEncoder(&m.head)
	return m
}

// Call begins a call, and sends so much of its message in frames of so many bytes. It is false once the host has closed the connection.
func (m *Mute) Call(method string, message []byte, frame int) bool {
	m.head.Reset()
	for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		_ = m.coder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	m.stream += 2
	err := m.WriteHeaders(http2.HeadersFrameParam{StreamID: m.stream - 1, BlockFragment: m.head.Bytes(), EndHeaders: true})
	for part := range slices.Chunk(message, frame) {
		err = errors.Join(err, m.WriteData(m.stream-1, false, part))
	}
	return err == nil
}

// Reset ends the call that began last.
func (m *Mute) Reset() bool { return m.WriteRSTStream(m.stream-1, http2.ErrCodeCancel) == nil }

// Framed is a message as gRPC sends it.
func Framed(m protobuf.Message) []byte {
	b, err := protobuf.Marshal(m)
	if err != nil {
		panic(err) // of a message of this program
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}
