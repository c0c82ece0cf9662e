package budget

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// A trace context is held as long as its message, however long it is.
func TestTraceparentHasWeight(t *testing.T) {
	m := &proto.SessionRequest{Traceparent: string(make([]byte, 1<<20)), Body: &proto.SessionRequest_Load{Load: &proto.Load{}}}
	if n := weigh(m); n < 1<<20 {
		t.Errorf("a mebibyte weighs %d", n)
	}
}

// A message's decoded elements count, not its bytes on the wire.
func TestWeight(t *testing.T) {
	empty := &proto.Store{}
	for range 1000 {
		empty.Chunks = append(empty.Chunks, &proto.StoreChunk{})
	}
	if n := weigh(&proto.SessionRequest{Body: &proto.SessionRequest_Store{Store: empty}}); n < 1000*100 {
		t.Errorf("a thousand empty chunks weigh %d", n)
	}
}
