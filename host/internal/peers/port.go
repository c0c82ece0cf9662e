package peers

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
)

const (
	leastMemory = 16 << 20  // lower bound of [Memory]
	mostMemory  = 256 << 20 // upper bound of [Memory]
	lineBytes   = 160 << 10 // charge for an idle connection
	callBytes   = 16 << 10  // charge for a call
	streamBytes = 64 << 10  // additional charge for a stream of residents
	mostHeader  = 8 << 10   // largest header of a call, and of its answer
	callWindow  = 64 << 10  // most bytes of a call that may arrive before they are read
	lineWindow  = 1 << 20   // most bytes of a connection that may arrive before they are read
	lineBuffer  = 64 << 10  // read buffer of a connection, and its write buffer

	mostKnocks        = 64 // connections before the end of their handshake
	handshakeTime     = 5 * time.Second
	mostHandshake     = 16 << 10               // bytes of a caller before the end of its handshake
	handshakeEffort   = 300 * time.Microsecond // estimate for a connection's begin
	certificateEffort = 2 * time.Millisecond   // estimate for each certificate of its chain after the first
	byteEffort        = 2 * time.Nanosecond    // estimate for a byte of a message; keys and numbers are cheap to decode
)

// Memory returns the maximum number of bytes that callers may make this host hold, for a memory limit of the process.
func Memory(limit int64) int64 { return max(leastMemory, min(limit/8, mostMemory)) }

// door is the listener of the server. It limits the number of connections before the end of their handshake, and gRPC
// limits the time that the handshake takes.
type door struct {
	net.Listener
	lending *lending
}

// Accept implements [net.Listener].
func (d door) Accept() (net.Conn, error) {
	for {
		c, err := d.Listener.Accept()
		if err != nil {
			return nil, err
		}
		who := d.lending.owner.callerAt(c.RemoteAddr(), nil)
		if d.lending.shares.take(who, handshakes, 1) {
			return &knock{Conn: c, left: mostHandshake, pay: func(took time.Duration) { d.lending.owner.effort.Spend(d.lending.owner.run, who.sender(), took) },
				over: sync.OnceFunc(func() { d.lending.shares.give(who, handshakes, 1) })}, nil
		}
		d.lending.count.refused.Add(1)
		_ = c.Close() // an error has no consequence: the connection is refused anyway
	}
}

// knock is a connection before the end of its handshake.
type knock struct {
	net.Conn
	left int                 // bytes that may arrive until then; negative once it has ended
	pay  func(time.Duration) // waits until the caller has made up for an estimated time
	over func()
}

// Read implements [net.Conn].
func (k *knock) Read(p []byte) (int, error) {
	if k.left < 0 {
		return k.Conn.Read(p)
	} else if k.left == 0 {
		return 0, fmt.Errorf("%w: a handshake of more than %d bytes", ErrHandshake, mostHandshake)
	}
	n, err := k.Conn.Read(p[:min(len(p), k.left)])
	k.left -= n
	return n, err
}

// Close implements [net.Conn].
func (k *knock) Close() error {
	k.over()
	return k.Conn.Close()
}

// line is a connection after its handshake. It is charged to its caller.
type line struct {
	*arrivals.Conn
	credentials.AuthInfo
	who  caller
	over func()
}

// Close implements [net.Conn].
func (c *line) Close() error {
	c.over()
	return c.Conn.Close()
}

// atDoor performs the handshake that turns a [knock] into a [line].
type atDoor struct {
	credentials.TransportCredentials
	lending *lending
}

// ServerHandshake implements [credentials.TransportCredentials].
func (d atDoor) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if k, ok := raw.(*knock); ok {
		k.pay(handshakeEffort)
	}
	c, info, err := d.TransportCredentials.ServerHandshake(raw)
	if k, ok := raw.(*knock); ok {
		k.left = -1
		k.over()
	}
	if err != nil {
		return nil, nil, err
	}
	l, err := d.lending.admitLine(c, info)
	if err != nil {
		d.lending.count.refused.Add(1)
		return nil, nil, err
	}
	return l, l, nil
}

// Clone implements [credentials.TransportCredentials].
func (d atDoor) Clone() credentials.TransportCredentials {
	return atDoor{d.TransportCredentials.Clone(), d.lending}
}

// called charges what comes of a peer that this host has called.
type called struct {
	credentials.TransportCredentials
	owner *Peers
	addr  string
}

// ClientHandshake implements [credentials.TransportCredentials].
func (t called) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := t.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	return arrivals.Dial(c, t.owner.effort, arrivals.Sender{ID: t.addr}), info, nil
}

// Clone implements [credentials.TransportCredentials].
func (t called) Clone() credentials.TransportCredentials {
	return called{t.TransportCredentials.Clone(), t.owner, t.addr}
}

// admitLine charges a connection to its caller, or refuses it.
func (l *lending) admitLine(c net.Conn, info credentials.AuthInfo) (*line, error) {
	who := l.owner.callerAt(c.RemoteAddr(), info)
	if !l.shares.take(who, lines, 1) {
		return nil, fmt.Errorf("%w: %s has as many connections as it may", ErrAway, who.id)
	}
	give := func() { l.shares.give(who, lines, 1); l.room.Send() }
	holder, err := l.memory.Join(who.id, l.tenant(who))
	if err == nil {
		if err = holder.Line(lineBytes); err != nil {
			holder.Leave()
		}
	}
	if err != nil {
		give()
		return nil, err
	}
	refused := func(err error) {
		l.count.refused.Add(1)
		l.owner.cfg.Log.Warn("a connection of a peer is closed: it takes more than its share", "peer", who.id, "error", err)
	}
	x := &line{arrivals.New(c, holder, callBytes, refused), info, who, sync.OnceFunc(func() { holder.LineOver(lineBytes); give() })}
	x.Pace(l.owner.effort, byteEffort, func() arrivals.Sender { return l.owner.callerOn(x, c.RemoteAddr()).sender() })
	return x, nil
}

// tenant returns the number under which a caller's memory is counted. Each configured host has its own number, and all other
// callers share 0.
func (l *lending) tenant(who caller) uint32 {
	if !who.known {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tenants[who.id] == 0 {
		l.tenants[who.id] = uint32(len(l.tenants)) + 1
	}
	return l.tenants[who.id]
}

// admit runs a call, unless the certificate of its connection is no longer trusted, and charges its answer to the memory of the
// connection.
func (l *lending) admit(ctx context.Context, q any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if err := l.owner.id.admits(ctx); err != nil {
		return nil, err
	}
	r, err := handle(ctx, q)
	if err != nil {
		return nil, err
	}
	answer, err := l.charge(ctx, r)
	if r, ok := r.(*proto.LeaseResponse); ok && err != nil {
		l.takeBack(r.GetLease())
	}
	return answer, err
}

func (l *lending) admitStream(srv any, st grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := l.owner.id.admits(st.Context()); err != nil {
		return err
	}
	return handle(srv, sender{st, l})
}

// sender charges each message of a stream to the memory of the connection.
type sender struct {
	grpc.ServerStream
	lending *lending
}

// SendMsg implements [grpc.ServerStream]. It waits until the connection has enough memory.
func (s sender) SendMsg(m any) error {
	for {
		room := s.lending.room.Next()
		answer, err := s.lending.charge(s.Context(), m)
		if err == nil {
			err = s.ServerStream.SendMsg(answer)
			if a, ok := answer.(*charged); ok && !a.encoded {
				a.over()
			}
			return err
		}
		select {
		case <-room:
		case <-s.Context().Done():
			return status.FromContextError(s.Context().Err()).Err()
		}
	}
}

// charged is a message with its memory charged to a connection until the kernel has its bytes, or until it is clear that they
// will not be sent.
type charged struct {
	protobuf.Message
	buffer  int
	over    func()
	encoded bool // gRPC frees the buffer, and with it the charge
}

// charge charges a message to the connection of a call.
func (l *lending) charge(ctx context.Context, m any) (any, error) {
	holder := holderOf(ctx)
	msg, ok := m.(protobuf.Message)
	if holder == nil || !ok {
		return m, nil
	}
	n := bufferFor(protobuf.Size(msg))
	if err := holder.Answer(int64(n)); err != nil {
		return nil, status.Error(codes.ResourceExhausted, "answers are not read")
	}
	return &charged{Message: msg, buffer: n, over: sync.OnceFunc(func() { holder.AnswerOver(int64(n)); l.room.Send() })}, nil
}

// holderOf returns the memory account of a call's connection, or nil.
func holderOf(ctx context.Context) *budget.Holder {
	if c := lineOf(ctx); c != nil {
		return c.Holder()
	}
	return nil
}

const (
	leastBuffer = 1<<10 + 1    // smallest buffer that gRPC returns to its pool: see [mem.NewBuffer]
	partMessage = part + 1<<10 // buffer for a message with a part of a piece
)

// messages is the pool of buffers for messages with a part of a piece.
var messages = sync.Pool{New: func() any { return new(make([]byte, partMessage)) }}

// bufferFor returns the size of the buffer for a message.
func bufferFor(size int) int {
	if size > partMessage/2 && size <= partMessage {
		return partMessage
	}
	return max(size, leastBuffer)
}

// chargedCodec encodes a [charged] message into its buffer. It leaves every other message to the codec that it wraps.
type chargedCodec struct{ encoding.CodecV2 }

// Marshal implements [encoding.CodecV2].
func (c chargedCodec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(*charged)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	var buf *[]byte
	if m.buffer == partMessage {
		buf = messages.Get().(*[]byte)
	} else {
		buf = new(make([]byte, m.buffer))
	}
	bytes, err := protobuf.MarshalOptions{UseCachedSize: true}.MarshalAppend((*buf)[:0], m.Message)
	if err != nil {
		return nil, err
	}
	*buf, m.encoded = bytes, true
	return mem.BufferSlice{mem.NewBuffer(buf, returned{m})}, nil
}

// Unmarshal implements [encoding.CodecV2]. It copies the message to memory of exactly its size, because the buffer from gRPC's
// pool has 1 MiB for a message of 33 KiB.
func (c chargedCodec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(protobuf.Message)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	return protobuf.Unmarshal(data.Materialize(), m)
}

// returned is a buffer pool that ends the charge of a message when gRPC returns its buffer.
type returned struct{ *charged }

// Get implements [mem.BufferPool].
func (returned) Get(n int) *[]byte { return new(make([]byte, n)) }

// Put implements [mem.BufferPool].
func (r returned) Put(buf *[]byte) {
	if r.buffer == partMessage {
		messages.Put(new((*buf)[:cap(*buf)]))
	}
	r.over()
}
