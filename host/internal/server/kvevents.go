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

// eventBatch is the most events of one message.
const eventBatch = 1024

// eventSource is what is streamed of [store.Store].
type eventSource interface {
	Changes() *entries.ChangeLog
	Snapshot(yield func([]entries.Change) bool)
}

// eventStream is one call of Events.
type eventStream struct {
	Store eventSource
	Epoch uint64 // of this run of the host: positions of another are not resumed
	Send  func(*proto.EventsResponse) error
	Aside *semaphore.Weighted // held but while it waits and while Send sends

	namespace []byte // empty: all
}

// Run streams until the context ends or sending fails.
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

// snapshot sends what is resident. The changes after seq follow it.
func (s *eventStream) snapshot(seq uint64) (err error) {
	s.Store.Snapshot(func(list []entries.Change) bool {
		err = s.Send(&proto.EventsResponse{Snapshot: true, Events: s.events(list)}) // nothing to resume after yet
		return err == nil
	})
	if err != nil {
		return err
	}
	return s.Send(&proto.EventsResponse{Epoch: s.Epoch, Seq: seq, Snapshot: true, SnapshotEnd: true})
}

// changes sends changes, if any is of the namespace.
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
