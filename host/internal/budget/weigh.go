package budget

import (
	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Estimates of what is held, in bytes.
const (
	sessionBytes   = 448 << 10 // gRPC's buffers, goroutines, queues, and keys of a LOOKUP
	namespaceBytes = 8         // of each byte of a namespace
	requestBytes   = 256
	jobBytes       = 1 << 10 // of each unit of each chunk of a job: its reservation, task, result
	grantBytes     = 16
	regionBytes    = 160
	streamBytes    = 768 << 10 // of a stream of events: a batch as changes, as events and on its way
)

// weigh estimates the memory that a message takes until it is answered, with what is done about it. An element of a list
// takes much more here than on the wire. What must get through whatever the session holds weighs nothing. A chunk of a
// job has so many units.
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
			n += each + units*jobBytes + 8*len(c.GetBlocks()) // the answer may have them again
		}
	case *proto.SessionRequest_Lookup:
		n += len(b.Lookup.GetKeys())
	case *proto.SessionRequest_Discard:
		n += len(b.Discard.GetKeys())
	default:
		n += each / 4 * protobuf.Size(m) // as if it were all empty elements
	}
	return int64(n)
}
