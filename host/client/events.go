package client

import (
	"context"

	"google.golang.org/grpc"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// Position is where a reader of events is. The zero value starts with a snapshot.
type Position struct{ Epoch, Seq uint64 }

// Event says that a chunk became resident, or that it went.
type Event struct {
	Evicted   bool
	Namespace kv.Digest
	Group     uint32
	Key       kv.Key
	Parent    kv.Key // of a chunk that was stored, kv.Root where the host does not know it
}

// EventBatch is some events, to be applied in order.
type EventBatch struct {
	Events []Event
	// Snapshot batches list what is resident. When the first of them comes, everything known before is to be forgotten.
	Snapshot, SnapshotEnd bool
	// After is where to resume after this batch; the zero value within a snapshot.
	After Position
}

// Events is a stream of events.
type Events struct {
	session *Session
	stream  grpc.ServerStreamingClient[proto.EventsResponse]
}

// Events streams what becomes resident in the host and what goes, of the session's namespace or of all, until the context
// ends. It resumes after a position if the host still holds what follows it; else it starts with a snapshot.
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
