package server

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// discards discards the keys with these numbers and compares the results.
func (p *peer) discards(ns []int, want ...client.DiscardResult) {
	p.t.Helper()
	list := keys(0)
	for _, n := range ns {
		list = append(list, key(n))
	}
	got, err := p.Discard(p.t.Context(), 0, list)
	testenv.OK(p.t, err)
	if !slices.Equal(got, want) {
		p.t.Errorf("discard of %d: %v, want %v", ns, got, want)
	}
}

// A client removes what it stored, not what anybody uses, and readers of events hear of it.
func TestDiscard(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 3)
	events, _ := p.reads(client.Position{}, false)
	events.until("snapshot", func() bool { return len(events.have) == 3 })

	l := p.look(1)
	p.discards([]int{0, 1, 9}, client.InUse, client.Removed, client.Absent)
	events.until("one is gone", func() bool { return len(events.have) == 2 && !events.have[key(1)] })
	p.check(1) // the lease's entry is whole
	testenv.OK(t, l.Release(t.Context()))
	p.discards([]int{0}, client.Removed)
	if hits := p.look(1).Hits(); hits != 0 {
		t.Errorf("%d hits", hits)
	}
	p.save(0, 2)
	p.check(3)
}

// A load that has begun ends with all its bytes, and its entry stays.
func TestDiscardDuringLoad(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 1)
	rules, err := faultfs.ParseRules("read **: hang")
	testenv.OK(t, err)
	r.faults.Set(rules...)
	job := p.loads(p.look(1), 1)
	p.discards([]int{0}, client.InUse)
	r.faults.Set()
	if res := p.loaded(job); len(res.Failed) != 0 || !p.holds(0, 0) {
		t.Errorf("failed: %v", res.Failed)
	}
	p.discards([]int{0}, client.Removed)
}

func TestDiscardOfNothingIsRefused(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.KeysPerLookup = 4 })
	p := r.dial(nil)
	for _, c := range []struct {
		group uint32
		keys  int
		want  error
	}{{0, 0, client.ErrInvalid}, {0, 5, client.ErrLimit}, {3, 1, client.ErrUnknown}} {
		if _, err := p.Discard(t.Context(), c.group, keys(c.keys)); !errors.Is(err, c.want) {
			t.Errorf("group %d, %d keys: %v, want %v", c.group, c.keys, err, c.want)
		}
	}
}

// A disk that hangs while files are removed keeps neither PING nor the end of the session.
func TestDiscardOnAHungDisk(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 1)
	rules, err := faultfs.ParseRules("remove **: hang")
	testenv.OK(t, err)
	r.faults.Set(rules...)
	answered := make(chan error, 1)
	go func() {
		_, err := p.Discard(t.Context(), 0, keys(1))
		answered <- err
	}()
	until(t, "the removal begins", func() bool { return r.faults.Injected() > 0 })
	testenv.NoError(t, p.Ping(t.Context()))
	p.Close()
	if err := <-answered; !errors.Is(err, client.ErrClosed) {
		t.Error(err)
	}
	until(t, "the session ends", func() bool { return r.server.Stats().Sessions == 0 })
	r.faults.Release()
}

// Every result of the store has its own on the wire.
func TestDiscardResults(t *testing.T) {
	reply := discardReply([]store.DiscardResult{store.DiscardAbsent, store.DiscardRemoved, store.DiscardInUse,
		store.DiscardOtherTenant, store.DiscardUnavailable})
	seen := map[proto.DiscardResult]bool{proto.DiscardResult_DISCARD_RESULT_UNSPECIFIED: true}
	for _, result := range reply.Results {
		if seen[result] {
			t.Errorf("%v twice, or unspecified", result)
		}
		seen[result] = true
	}
}
