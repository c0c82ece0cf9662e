package peers

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec of all other messages
	"google.golang.org/grpc/mem"
)

// parted is a FetchResponse that is decoded straight into its destination. The generated code would allocate the bytes and copy
// them once more.
type parted struct {
	dst  []byte // the part of the destination that is still empty
	have int    // number of bytes of dst that the last message filled
	bad  error  // decoding error of the last message; gRPC itself passes on only its text
}

// partCodec decodes a [parted]. It leaves every other message to the codec that it wraps.
type partCodec struct{ encoding.CodecV2 }

var byParts = partCodec{encoding.GetCodecV2("proto")}

// dataTag is the tag of the only field of a FetchResponse: field 1, of type bytes.
const dataTag = 1<<3 | 2

// Unmarshal implements [encoding.CodecV2].
func (c partCodec) Unmarshal(data mem.BufferSlice, v any) error {
	p, ok := v.(*parted)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	p.bad = p.read(data)
	return p.bad
}

func (p *parted) read(data mem.BufferSlice) error {
	r := data.Reader()
	defer r.Close()
	tag, err := r.ReadByte()
	if err != nil || tag != dataTag {
		return fmt.Errorf("%w: no bytes", ErrMessage)
	}
	n, err := binary.ReadUvarint(r)
	if err != nil || n == 0 || n != uint64(r.Remaining()) || n > uint64(len(p.dst)) {
		return fmt.Errorf("%w: %d bytes where at most %d are left", ErrMessage, r.Remaining(), len(p.dst))
	}
	p.have, err = io.ReadFull(r, p.dst[:n])
	return err
}
