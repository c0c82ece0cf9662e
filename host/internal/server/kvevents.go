package server

import (
	"bytes"
	"context"
	"errors"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sync/semaphore"
)

// eventBatch is the maximum number of events in a message.
const eventBatch = 1024

// eventSource is the part of [store.Store] that event streams read.
type eventSource interface {
	Changes() *entries.ChangeLog
	Snapshot(yield func([]entries.Change) bool)
}

// eventStream is one call of Events.
type eventStream struct {
	Store eventSource
	Epoch uint64 // identifies this run of the host; positions of other runs cannot be resumed
	Send  func(*proto.EventsResponse) error
	Aside *semaphore.Weighted // one unit is held except while the stream waits or Send sends

	namespace []byte // digest of the namespace to stream; empty for all
}

// Run streams events until the context ends or Send fails. It begins with a snapshot unless the request resumes a position of
// this run, and sends another snapshot if it falls behind the log.
func (s *eventStream) Run(ctx context.Context, q *proto.EventsRequest) error {
	s.namespace = q.GetNamespaceDigest()
	_ = s.Aside.Acquire(context.Background(), 1)
	defer s.Aside.Release(1)
	log, after := s.Store.Changes(), q.GetAfter()
	start := log.Start()
	if q.GetEpoch() != s.Epoch {
		if err := s.snapshot(start); err != nil {
			return err
		}
		after = start
	}
	changes := make([]entries.Change, 0, eventBatch)
	for {
		got, wake, err := log.Read(after, changes[:0])
		switch {
		case errors.Is(err, entries.ErrLost):
			after = log.Start()
			if err := s.snapshot(after); err != nil {
				return err
			}
		case len(got) > 0:
			after = got[len(got)-1].Seq
			if err := s.changes(after, got); err != nil {
				return err
			}
		default:
			s.Aside.Release(1)
			select {
			case <-wake:
			case <-ctx.Done():
			}
			_ = s.Aside.Acquire(context.Background(), 1)
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
	}
}

// snapshot sends all resident entries. The stream continues with the changes after seq.
func (s *eventStream) snapshot(seq uint64) (err error) {
	s.Store.Snapshot(func(list []entries.Change) bool {
		err = s.Send(&proto.EventsResponse{Snapshot: true, Events: s.events(list)}) // without a position: a snapshot cannot be resumed before its end
		return err == nil
	})
	if err != nil {
		return err
	}
	return s.Send(&proto.EventsResponse{Epoch: s.Epoch, Seq: seq, Snapshot: true, SnapshotEnd: true})
}

// changes sends the changes in the stream's namespace, if there are any.
func (s *eventStream) changes(seq uint64, list []entries.Change) error {
	events := s.events(list)
	if len(events) == 0 {
		return nil
	}
	return s.Send(&proto.EventsResponse{Epoch: s.Epoch, Seq: seq, Events: events})
}

func (s *eventStream) events(list []entries.Change) (events []*proto.Event) {
	for i := range list {
		c := &list[i]
		if len(s.namespace) > 0 && !bytes.Equal(s.namespace, c.Namespace[:]) {
			continue
		}
		e := &proto.Event{
			Kind: proto.EventKind(c.Kind), Group: c.Group,
			NamespaceDigest: bytes.Clone(c.Namespace[:]), Key: bytes.Clone(c.Key[:]),
		}
		if c.Parent != kv.Root {
			e.Parent = bytes.Clone(c.Parent[:])
		}
		events = append(events, e)
	}
	return events
}
