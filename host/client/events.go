package client

import (
	"context"

	"google.golang.org/grpc"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// Position is the position of a reader in the stream of events. The zero value starts with a snapshot.
type Position struct{ Epoch, Seq uint64 }

// Event reports that a chunk became resident or was removed.
type Event struct {
	Evicted   bool
	Namespace kv.Digest
	Group     uint32
	Key       kv.Key
	Parent    kv.Key // parent of a stored chunk; kv.Root if the host does not know it
}

// EventBatch is some events, to be applied in order.
type EventBatch struct {
	Events []Event
	// Snapshot batches list the resident chunks. The reader must forget everything it knew when the first of them arrives.
	Snapshot, SnapshotEnd bool
	// After is the position to resume from after this batch. It is the zero value within a snapshot.
	After Position
}

// Events is a stream of events.
type Events struct {
	session *Session
	stream  grpc.ServerStreamingClient[proto.EventsResponse]
}

// Events streams the chunks that become resident and those that are removed, of the session's namespace or of all namespaces.
// The stream ends with the context. It resumes after a position if the host still holds the following events. Otherwise it
// starts with a snapshot.
func (s *Session) Events(ctx context.Context, from Position, all bool) (*Events, error) {
	q := &proto.EventsRequest{Epoch: from.Epoch, After: from.Seq}
	if !all {
		digest := s.hello.Namespace.Digest()
		q.NamespaceDigest = digest[:]
	}
	stream, err := s.stub.Events(ctx, q)
	if err != nil {
		return nil, s.gone(err)
	}
	return &Events{s, stream}, nil
}

// Next returns the next batch.
func (e *Events) Next() (*EventBatch, error) {
	m, err := e.stream.Recv()
	if err != nil {
		return nil, e.session.gone(err)
	}
	b := &EventBatch{
		Snapshot: m.GetSnapshot(), SnapshotEnd: m.GetSnapshotEnd(), After: Position{m.GetEpoch(), m.GetSeq()},
	}
	for _, v := range m.GetEvents() {
		event := Event{Evicted: v.GetKind() == proto.EventKind_EVENT_KIND_EVICTED, Group: v.GetGroup()}
		copy(event.Namespace[:], v.GetNamespaceDigest())
		copy(event.Key[:], v.GetKey())
		copy(event.Parent[:], v.GetParent())
		b.Events = append(b.Events, event)
	}
	return b, nil
}
