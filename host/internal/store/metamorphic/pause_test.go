package metamorphic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// runPause stops a host at one operation on files, for as long as the others take to give it up, and perhaps until it
// has joined again beside the operation that stands still. Whatever goes on then must be harmless. Nothing else runs
// at the same time, so that the history repeats.
func (n operator) runPause(op Op) (string, error) {
	if n.r.h.Kind.hosts == 1 || n.armed || n.asleep > 0 {
		return "not now", nil
	}
	hang := faultfs.Rule{
		Op: staging.OpAny, Path: "**", When: faultfs.When{Nth: op.number("call")},
		Fault: faultfs.Fault{Hang: true},
	}
	n.faults.Set(append(slices.Clone(n.r.rules), hang)...)
	defer n.faults.Set(n.r.rules...)
	of, _ := parsePiece(op.get("entry"), 2)
	result := ""
	ctx, ended := context.WithCancel(context.Background())
	go func() {
		defer ended()
		if op.get("step") == "true" {
			n.r.step(n.node, func() { _ = n.store.Maintain(ctx, 0, store.Step) })
			return
		}
		result = n.storeEntry(of.Entry)
	}()
	if n.faults.AwaitHanging(ctx, 1) != nil {
		return "no such call: " + result, nil
	}
	err := n.r.standStill(n.node, op)
	n.faults.Release()
	<-ctx.Done()
	n.asleep = 0
	return "paused: " + result, err
}

// standStill is the time that a host's operation does not go on.
func (r *runner) standStill(n *node, op Op) error {
	const always = 1 << 30
	n.asleep = always
	doubt(n)
	for range op.number("asleep") {
		if err := r.others(n); err != nil {
			return err
		}
	}
	if r.turns.TryLock() { // else the operation is of a step, of this host or while it waits for credit
		r.turns.Unlock()
		r.fill(n, op.get("fill"))
	}
	for range op.number("awake") {
		if !n.inStep.Load() {
			r.step(n, func() { _ = n.store.Maintain(context.Background(), 0, store.Step) })
			n.doubted.Store(true) // what was begun before stands still
		}
		if err := r.others(n); err != nil {
			return err
		}
	}
	return nil
}

// others lets the other hosts make a step, and looks at everything.
func (r *runner) others(n *node) (err error) {
	r.now.Add(int64(pollEvery))
	for _, o := range r.nodes {
		if o != n && o.store != nil && o.asleep == 0 {
			r.step(o, func() { _ = o.store.Maintain(context.Background(), 0, store.Step) })
		}
	}
	for _, o := range r.nodes {
		if o.store != nil {
			if ierr := o.invariants(); ierr != nil {
				err = errors.Join(err, fmt.Errorf("host %s, while %s stands still: %w", o.ID, n.ID, ierr))
			}
		}
	}
	return errors.Join(err, r.reported())
}

// fill stores entries on the other hosts.
func (r *runner) fill(n *node, list string) {
	i := 0
	for text := range strings.SplitSeq(list, "+") {
		o := r.nodes[i%len(r.nodes)]
		if i++; o == n || o.store == nil || o.asleep > 0 {
			continue
		}
		if of, ok := parsePiece(text, 2); ok {
			o.storeEntry(of.Entry)
		}
	}
}
