package server

import (
	"bytes"
	"errors"

	"google.golang.org/grpc"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/store/changelog"
)

// eventBatch is the most events of one message.
const eventBatch = 1024

// Events streams the changes of what is resident.
func (s service) Events(q *proto.EventsRequest, st grpc.ServerStreamingServer[proto.EventBatch]) error {
	f := &eventStream{server: s.Server, send: st.Send, namespace: q.GetNamespaceDigest()}
	log, after := s.store.Changes(), q.GetAfter()
	start := log.Start()
	if q.GetEpoch() != s.epoch {
		var err error
		if after, err = f.snapshot(start); err != nil {
			return err
		}
	}
	changes := make([]changelog.Change, 0, eventBatch)
	for {
		got, wake, err := log.Read(after, changes[:0])
		switch {
		case errors.Is(err, changelog.ErrLost):
			if after, err = f.snapshot(log.Start()); err != nil {
				return err
			}
		case len(got) > 0:
			after = got[len(got)-1].Seq
			if err := f.changes(after, got); err != nil {
				return err
			}
		default:
			select {
			case <-wake:
			case <-st.Context().Done():
				return st.Context().Err()
			case <-s.quit:
				return ErrClosing
			}
		}
	}
}

// eventStream is one call of Events.
type eventStream struct {
	server    *Server
	send      func(*proto.EventBatch) error
	namespace []byte // empty: all
}

// snapshot sends what is resident, and returns the number of the change to read on from.
func (f *eventStream) snapshot(seq uint64) (uint64, error) {
	var err error
	f.server.store.Snapshot(func(list []changelog.Change) bool {
		err = f.send(&proto.EventBatch{Snapshot: true, Events: f.events(list)}) // nothing to resume after yet
		return err == nil
	})
	if err == nil {
		err = f.send(&proto.EventBatch{Epoch: f.server.epoch, Seq: seq, Snapshot: true, SnapshotEnd: true})
	}
	return seq, err
}

// changes sends changes, if any is of the namespace.
func (f *eventStream) changes(seq uint64, list []changelog.Change) error {
	events := f.events(list)
	if len(events) == 0 {
		return nil
	}
	return f.send(&proto.EventBatch{Epoch: f.server.epoch, Seq: seq, Events: events})
}

func (f *eventStream) events(list []changelog.Change) (events []*proto.Event) {
	for i := range list {
		c := &list[i]
		if len(f.namespace) > 0 && !bytes.Equal(f.namespace, c.Namespace[:]) {
			continue
		}
		e := &proto.Event{
			Kind: proto.EventKind(c.Kind), NamespaceDigest: c.Namespace[:], Group: c.Group, Key: c.Key[:],
		}
		if c.Parent != chunk.Root {
			e.Parent = c.Parent[:]
		}
		e.Key, e.Parent, e.NamespaceDigest = bytes.Clone(e.Key), bytes.Clone(e.Parent), bytes.Clone(e.NamespaceDigest)
		events = append(events, e)
	}
	return events
}
