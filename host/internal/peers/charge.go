package peers

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/budget"
)

// sender charges each message of a stream to the memory of the connection.
type sender struct {
	grpc.ServerStream
	port *port
}

// SendMsg implements [grpc.ServerStream]. It waits until the connection has enough memory.
func (s sender) SendMsg(m any) error {
	for {
		room := s.port.room.Next()
		answer, err := s.port.charge(s.Context(), m)
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
func (p *port) charge(ctx context.Context, m any) (any, error) {
	holder := holderOf(ctx)
	msg, ok := m.(protobuf.Message)
	if holder == nil || !ok {
		return m, nil
	}
	n := bufferFor(protobuf.Size(msg))
	if err := holder.Answer(int64(n)); err != nil {
		return nil, status.Error(codes.ResourceExhausted, "answers are not read")
	}
	return &charged{Message: msg, buffer: n, over: sync.OnceFunc(func() { holder.AnswerOver(int64(n)); p.room.Send() })}, nil
}

// holderOf returns the memory account of a call's connection, or nil.
func holderOf(ctx context.Context) *budget.Holder {
	if c := lineOf(ctx); c != nil {
		return c.Holder()
	}
	return nil
}

const (
	part        = 512 << 10    // bytes in a message of Fetch
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
