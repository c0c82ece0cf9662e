package budget

import (
	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Estimates of memory in bytes.
const (
	sessionBytes   = 448 << 10 // gRPC's buffers, goroutines, queues, and keys of a LOOKUP
	namespaceBytes = 8         // for each byte of a namespace
	requestBytes   = 256
	jobBytes       = 1 << 10 // for each unit of each chunk of a job: reservation, task and result
	grantBytes     = 16
	regionBytes    = 160
	streamBytes    = 768 << 10 // for a stream of events: a batch of changes, its events, and the message under way
)

// weigh estimates the memory that a message and its handling take until it is answered. An element of a list takes much more
// memory here than on the wire. Messages that must always be accepted weigh nothing. units is the number of units of a job's
// chunk.
func weigh(m *proto.SessionRequest, units int) int64 {
	const each = 128
	n := each + len(m.GetTraceparent())
	switch b := m.Body.(type) {
	case *proto.SessionRequest_Ping, *proto.SessionRequest_Cancel:
		return 0
	case *proto.SessionRequest_Store:
		for _, c := range b.Store.GetChunks() {
			n += each + units*jobBytes + len(c.GetKey()) + len(c.GetParent()) + 8*len(c.GetBlocks())
		}
	case *proto.SessionRequest_Load:
		for _, c := range b.Load.GetChunks() {
			n += each + units*jobBytes + 8*len(c.GetBlocks()) // the answer may repeat the blocks
		}
	case *proto.SessionRequest_Lookup:
		n += len(b.Lookup.GetKeys())
	case *proto.SessionRequest_Discard:
		n += len(b.Discard.GetKeys())
	default:
		n += each / 4 * protobuf.Size(m) // as if the whole message were empty elements
	}
	return int64(n)
}
