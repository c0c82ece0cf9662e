package peers

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec of all other messages
	"google.golang.org/grpc/mem"
)

// parted is a FetchResponse that is read to where its bytes are wanted. The generated code would allocate, and copy once more.
type parted struct {
	dst  []byte // the bytes that are still wanted
	have int    // of them were in the message
	bad  error  // what was wrong with it: gRPC passes on the text alone
}

// partCodec reads parted, and all other messages as they are.
type partCodec struct{ encoding.CodecV2 }

var byParts = partCodec{encoding.GetCodecV2("proto")}

// dataTag begins the only field of a FetchResponse: the first, of bytes.
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
