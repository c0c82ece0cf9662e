package server

import (
	"context"
	"testing"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// reader applies events to a set of keys.
type reader struct {
	t       *testing.T
	events  *client.Events
	have    map[kv.Key]bool
	started bool // a snapshot has ended, or the stream was resumed
	at      client.Position
}

func (p *peer) reads(from client.Position, all bool) (*reader, context.CancelFunc) {
	p.t.Helper()
	ctx, stop := context.WithCancel(p.t.Context())
	p.t.Cleanup(stop)
	e, err := p.Events(ctx, from, all)
	if err != nil {
		p.t.Fatal(err)
	}
	return &reader{t: p.t.(*testing.T), events: e, have: map[kv.Key]bool{}, started: from != client.Position{}}, stop
}

// until applies batches until a condition holds.
func (r *reader) until(what string, holds func() bool) {
	r.t.Helper()
	for !r.started || !holds() {
		b, err := r.events.Next()
		if err != nil {
			r.t.Fatalf("next event, %s: %v", what, err)
		}
		if b.Snapshot && r.started {
			r.t.Logf("%s: a new snapshot", what)
			clear(r.have)
			r.started = false
		}
		for _, e := range b.Events {
			if e.Evicted {
				delete(r.have, e.Key)
			} else {
				r.have[e.Key] = true
			}
		}
		r.started = r.started || b.SnapshotEnd
		if !b.Snapshot || b.SnapshotEnd {
			r.at = b.After
		}
	}
}

// A reader starts with what is there, hears what comes and goes, and resumes where it was.
func TestEvents(t *testing.T) {
	var piece int64
	{
		r := newRig(t, nil)
		r.dial(nil).save(0, 1)
		piece = r.store.Stats().Roots[0].Used
	}
	r := newRig(t, func(_ *Config, s *store.Config) { s.Roots[0].Capacity = 3*piece + piece/2 })
	p := r.dial(nil)
	p.save(0, 2)
	first, stop := p.reads(client.Position{}, false)
	first.until("snapshot", func() bool { return len(first.have) == 2 })
	if !first.have[key(0)] || !first.have[key(1)] {
		t.Fatalf("snapshot: got %v, want the first two chunks", first.have)
	}
	p.save(2, 3)
	first.until("a chunk is stored", func() bool { return first.have[key(2)] })
	stop()
	p.save(3, 4) // another goes
	again, _ := p.reads(first.at, false)
	again.have = first.have
	again.until("resumed", func() bool { return again.have[key(3)] && len(again.have) == 3 })

	other := r.dial(func(h *client.Hello) { h.Engine, h.Namespace.Model = "other", "other" })
	elsewhere, _ := other.reads(client.Position{}, false)
	elsewhere.until("another namespace", func() bool { return true })
	if len(elsewhere.have) != 0 {
		t.Errorf("events of another namespace: %v", elsewhere.have)
	}
	all, _ := other.reads(client.Position{}, true)
	all.until("all namespaces", func() bool { return len(all.have) == 3 })

	stale, _ := p.reads(client.Position{Epoch: 1, Seq: 99}, false) // of an earlier run of the host
	stale.started = false
	stale.until("a position that the host does not know", func() bool { return len(stale.have) == 3 })
	r.store.Changes().Reset()
	again.started = true
	again.until("changes were lost", func() bool { return len(again.have) == 3 && again.at.Seq > first.at.Seq+2 })
}
