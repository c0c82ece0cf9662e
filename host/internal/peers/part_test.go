package peers

import (
	"bytes"
	"errors"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	wire "github.com/kvhost/kvhost/host/internal/proto"
)

// FuzzPart: a message of Fetch is read as the generated code reads it, or refused; nothing is written beyond what was asked for.
func FuzzPart(f *testing.F) {
	for _, n := range []int{0, 1, 127, 128, 300} {
		m, err := proto.Marshal(&wire.FetchResponse{Data: bytes.Repeat([]byte{3}, n)})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(m, 1)
		f.Add(append(m, 0), 5)
	}
	f.Fuzz(func(t *testing.T, message []byte, cut int) {
		const asked = 256
		at := min(max(cut, 0), len(message))
		buf := bytes.Repeat([]byte{0xa5}, asked+8)
		p := parted{dst: buf[:asked]}
		err := byParts.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message[:at]), mem.SliceBuffer(message[at:])}, &p)
		if !bytes.Equal(buf[asked:], bytes.Repeat([]byte{0xa5}, 8)) {
			t.Fatal("bytes were written beyond what was asked for")
		}
		if err != nil {
			if !errors.Is(err, ErrMessage) {
				t.Fatalf("%v, want %v", err, ErrMessage)
			}
			return
		}
		var m wire.FetchResponse
		if err := proto.Unmarshal(message, &m); err != nil || !bytes.Equal(m.GetData(), buf[:p.have]) || p.have == 0 {
			t.Fatalf("%d bytes, the generated code says %v and %d", p.have, err, len(m.GetData()))
		}
	})
}
