package server

import (
	"context"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/budget"
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
	testenv.OK(p.t, err)
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
	r := newRig(t, func(_ *Config, s *store.Config) { s.Roots[0].Capacity = 3*pieceBytes + pieceBytes/2 })
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

// A connection has only as many streams of events as its share of the memory has room for, and what they take is counted.
func TestStreamsOfEventsAreBounded(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) {
		c.Limits.Sessions = 8
		c.Arriving = budget.OfArriving(16<<20, 8)
	})
	p := r.dial(nil)
	before := figuresOf(r.server, "memory").Held
	open := 0
	var refused error
	for range 6 { // a connection may have as many calls, and its session
		ctx, stop := context.WithCancel(t.Context())
		t.Cleanup(stop)
		e, err := p.Events(ctx, client.Position{}, true)
		testenv.OK(t, err)
		if _, err := e.Next(); err == nil {
			open++
		} else if refused = err; !strings.Contains(err.Error(), "max_memory") {
			t.Fatalf("stream %d: %v, want a refusal that names max_memory", open, err)
		}
	}
	if open == 0 || refused == nil {
		t.Errorf("%d streams are open and the refusal is %v, want some of each", open, refused)
	}
	if f := figuresOf(r.server, "memory"); f.Parts["events"] < int64(open)<<19 || f.Held-before < f.Parts["events"] {
		t.Errorf("memory with %d streams: %+v, %d before; want them counted", open, f, before)
	}
	p.Close()
	until(t, "all is given back", func() bool { return figuresOf(r.server, "memory").Parts["events"] == 0 })
}
