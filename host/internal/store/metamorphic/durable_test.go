package metamorphic

import (
	"fmt"
	"slices"
)

// durable is what a host owes after a crash: the entries that were hits, where a piece is durable before it is one.
type durable struct {
	entries []Entry
	sealed  bool // the life has ended
}

// update looks at what is durable after an operation.
func (d *durable) update(n *node) error {
	if n.store == nil || n.died() || d.sealed || !n.Strict {
		return nil
	}
	list, err := n.present()
	d.entries = list
	return err
}

// ends notes that a life ends, or has ended at a call that is past: what was evicted meanwhile is not owed any more.
func (d *durable) ends(n *node) {
	if d.sealed || n.store == nil {
		return
	}
	d.sealed = true
	d.entries = slices.DeleteFunc(d.entries, func(e Entry) bool {
		there, err := n.hit(e)
		return err == nil && !there
	})
}

// reopened checks that what is owed is there. Evicted files whose removal was lost come back, and may have pushed
// others out when the store opened.
func (d *durable) reopened(n *node) error {
	d.sealed = false
	var kept []Entry
	for _, e := range d.entries {
		there, err := n.hit(e)
		if err != nil {
			return err
		}
		if there {
			kept = append(kept, e)
		}
	}
	missing, evicted := len(d.entries)-len(kept), n.store.Stats().Roots[0].Evictions
	if uint64(missing) > uint64(evicted) {
		return fmt.Errorf("host %s: of the durable entries %v only %v are hits, and %d were evicted",
			n.ID, d.entries, kept, evicted)
	}
	d.entries = kept
	return nil
}

func (d *durable) owes(e Entry) bool { return slices.Contains(d.entries, e) }
