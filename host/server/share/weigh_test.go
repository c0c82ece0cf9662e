package share

import (
	"testing"

	"github.com/kvhost/kvhost/host/proto"
)

// A message's decoded elements count, not its bytes on the wire.
func TestWeight(t *testing.T) {
	empty := &proto.Store{}
	for range 1000 {
		empty.Chunks = append(empty.Chunks, &proto.StoreChunk{})
	}
	if n := weigh(&proto.ClientMessage{Body: &proto.ClientMessage_Store{Store: empty}}); n < 1000*100 {
		t.Errorf("a thousand empty chunks weigh %d", n)
	}
}
