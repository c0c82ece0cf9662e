package store

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/kvhost/kvhost/host/policy"
)

// errSuperseded says that another policy has taken over meanwhile.
var errSuperseded = errors.New("store: another policy has taken over")

// Handover is how an evict policy came to know what is in its root.
type Handover uint8

const (
	// Replayed: it was told of every entry, in order of last touch.
	Replayed Handover = iota
	// Loaded: it took over the state of the one before it.
	Loaded
)

func (h Handover) String() string {
	if h == Loaded {
		return "state"
	}
	return "replay"
}

// handoverBytes bounds the state that is taken over: it is copied while nobody else gets at the root, and no session may
// wait for long: lru takes 3 ms for so much, as a Go module. A policy that keeps more is told of the entries instead, in slices.
const handoverBytes = 2 << 20

// succession is a change of a root's evict policy under way. While there is one, no other begins.
type succession struct {
	r       *root
	ctx     context.Context
	b, from *bound
	h       *successor
	how     Handover
	was     lineup
}

// lineup is who decides in a root, and what there was to say of that.
type lineup struct {
	evict   *policy.Evict
	standin *recency
	acting  *bound
	faulted policy.Stats
}

// prepare starts a policy beside the acting one, from, and lets it know what is here. finish or abandon must follow when
// there is no error; or take, and then keep or undo.
func (r *root) prepare(ctx context.Context, b, from *bound) (*succession, error) {
	if err := r.succession.lock(ctx); err != nil { // a scan may hold it for long
		return nil, err
	}
	c := &succession{r: r, ctx: ctx, b: b, from: from}
	err := c.inherit()
	if err == nil && c.h == nil {
		err = c.learn()
	}
	if err != nil {
		c.abandon()
		return nil, err
	}
	return c, nil
}

// inherit takes over the acting policy's state, if both keep the same. The events that come until that is done are held
// back for it.
func (c *succession) inherit() error {
	r, format := c.r, c.b.Module.StateFormat()
	if format == "" || format != c.from.Module.StateFormat() {
		return nil
	}
	h := &successor{whole: true}
	r.mu.Lock()
	var state policy.State
	ok := false
	if r.acting == c.from && r.standin == nil {
		var err error
		if state, ok, err = r.evict.Save(handoverBytes); err != nil {
			r.replace(err)
		}
	}
	if ok {
		r.next = h
	}
	r.mu.Unlock()
	if !ok {
		return nil
	}
	next, err := r.newEvict(c.ctx, c.b, state)
	if err == nil && next.Loaded() {
		c.h, c.how = h, Loaded
		return c.catchUp(next)
	}
	r.mu.Lock()
	r.next = nil
	r.mu.Unlock()
	if err == nil {
		err = next.Close()
	}
	return err
}

// catchUp delivers the events that were held back, a slice at a time.
func (c *succession) catchUp(next *policy.Evict) error {
	r, h := c.r, c.h
	r.mu.Lock()
	h.evict = next
	r.mu.Unlock()
	for {
		r.mu.Lock()
		n := min(len(h.held), replaySlice)
		for _, ev := range h.held[:n] {
			if h.err == nil {
				h.err = next.Event(ev)
			}
		}
		h.held = h.held[n:]
		left, err := len(h.held), h.err
		r.mu.Unlock()
		if left == 0 || err != nil {
			return cmp.Or(err, c.ctx.Err())
		}
	}
}

// learn tells the policy of all entries in order of last touch, with the lock for a slice of them at a time.
func (c *succession) learn() error {
	r := c.r
	next, err := r.newEvict(c.ctx, c.b, policy.State{})
	if err != nil {
		return err
	}
	h := &successor{evict: next}
	c.h = h
	r.mu.Lock()
	if r.acting != c.from {
		h.err = errSuperseded
	} else {
		r.next = h
	}
	err = h.err
	r.mu.Unlock()
	if err != nil {
		return err
	}
	return r.tell(c.ctx, h)
}

// tell goes through all entries in order of last touch.
func (r *root) tell(ctx context.Context, h *successor) error {
	for order := r.snapshot(); len(order) > 0; {
		if err := cmp.Or(ctx.Err(), r.store.run.Err()); err != nil {
			return err
		}
		n, start := min(len(order), replaySlice), time.Now()
		r.mu.Lock()
		for _, m := range order[:n] {
			if r.stands(m.mark) && !h.knows(m.slot) {
				h.announce(r, m.slot, m.print)
			}
		}
		err := h.err
		r.mu.Unlock()
		if order = order[n:]; err != nil {
			return err
		}
		breathe(start)
	}
	return nil
}

// abandon leaves the acting policy where it is.
func (c *succession) abandon() {
	c.r.mu.Lock()
	c.r.next = nil
	c.r.mu.Unlock()
	if c.h != nil && c.h.evict != nil {
		_ = c.h.evict.Close()
	}
	c.r.succession.unlock()
}

// finish lets the policy take over, unless it fails at the last moment.
func (c *succession) finish() (entries int, err error) {
	if entries, err = c.take(); err == nil {
		c.keep()
	}
	return entries, err
}

// take lets the policy decide, unless it fails at the last moment. The one before it goes on hearing of everything, so that
// it can be had back.
func (c *succession) take() (entries int, err error) {
	r, h := c.r, c.h
	r.mu.Lock()
	if h.err == nil {
		h.err = h.evict.Flush()
	}
	if h.err == nil {
		h.err = r.store.run.Err()
	}
	if h.err != nil {
		r.mu.Unlock()
		c.abandon()
		return 0, h.err
	}
	c.was = lineup{r.evict, r.standin, r.acting, r.faulted}
	r.evict, r.standin, r.next = h.evict, nil, nil
	if c.was.standin == nil {
		r.next = &successor{evict: c.was.evict, whole: true}
	}
	if c.b == c.from {
		r.faulted = addStats(r.faulted, c.was.evict.Stats())
	} else {
		r.acting, r.faulted = c.b.hold(), policy.Stats{}
	}
	entries = int(r.x.Len())
	r.mu.Unlock()
	return entries, nil
}

// keep lets go of the policy before.
func (c *succession) keep() {
	r := c.r
	r.mu.Lock()
	r.next = nil
	r.mu.Unlock()
	r.succession.unlock()
	r.log.Info("evict policy took over", "policy", c.b.Name, "sha256", c.b.Module.Digest(), "from", c.from.Name, "by", c.how)
	_ = c.was.evict.Close() // not under the lock: giving memory back takes time
	if c.b != c.from {
		c.from.release()
	}
}

// undo has the policy before decide again. It heard of all that happened; if it could not bear that it has failed, as it would have.
func (c *succession) undo() {
	r := c.r
	r.mu.Lock()
	old := r.next
	r.evict, r.standin, r.acting, r.faulted, r.next = c.was.evict, c.was.standin, c.was.acting, c.was.faulted, nil
	if old != nil && old.err != nil {
		r.replace(old.err)
	}
	r.mu.Unlock()
	r.succession.unlock()
	_ = c.h.evict.Close()
	if c.b != c.from {
		c.b.release()
	}
}
