package janitor

import (
	"cmp"
	"context"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
)

// tell brings the policy up to date, in order of last use.
func (j *Janitor) tell(ctx context.Context) error {
	for who, e := range j.entries {
		if len(e.files) == 0 {
			j.forget(who, e)
		}
	}
	fresh := j.evict == nil || uint32(len(j.entries)) > j.max
	if fresh {
		if err := j.start(ctx); err != nil {
			return err
		}
	}
	news := make([]*entry, 0, len(j.entries))
	for _, e := range j.entries {
		if e.slot == abi.None || e.used.After(e.told) {
			news = append(news, e)
		}
	}
	slices.SortFunc(news, func(a, b *entry) int { return cmp.Or(a.used.Compare(b.used), cmp.Compare(a.print, b.print)) })
	for _, e := range news {
		op := abi.OpTouch
		if e.slot == abi.None {
			op = abi.OpInsert
			if fresh {
				op = abi.OpResident
			}
			j.insert(e)
		}
		e.told = e.used
		j.send(e, op)
	}
	return nil
}

// start makes a policy that knows nothing yet.
func (j *Janitor) start(ctx context.Context) error {
	if j.evict != nil {
		_ = j.evict.Close()
	}
	j.max = max(leastSlots, uint32(2*len(j.entries)))
	var err error
	j.evict, err = j.o.Evict.NewEvict(ctx, policy.EvictOptions{
		MaxSlots: j.max, Capacity: uint64(j.o.Capacity), Seed: j.o.Seed, Config: j.o.EvictConfig,
	})
	if err != nil {
		return err
	}
	j.slots, j.free = nil, nil
	for _, e := range j.entries {
		e.slot = abi.None
	}
	return nil
}

func (j *Janitor) insert(e *entry) {
	if n := len(j.free); n > 0 {
		e.slot = j.free[n-1]
		j.free = j.free[:n-1]
	} else {
		e.slot = uint32(len(j.slots))
		j.slots = append(j.slots, nil)
	}
	j.slots[e.slot] = e
}

// send tells the policy of an entry. One that fails is replaced by the built-in one, which is told everything.
func (j *Janitor) send(e *entry, op abi.Op) {
	err := j.evict.Event(abi.Event{
		Slot: e.slot, Parent: abi.None, Key: e.print, Size: uint32((e.bytes() + abi.SizeUnit - 1) / abi.SizeUnit),
		Tenant: 0, Op: op,
		Time: uint64(max(0, e.used.UnixNano())),
	})
	if err != nil {
		j.replace(err)
	}
}

func (j *Janitor) replace(cause error) {
	if j.fallen {
		return
	}
	j.fallen = true
	j.o.Log.Error("evict policy failed; the built-in one takes over", "error", cause)
	j.o.Evict, j.o.EvictConfig = policy.Builtin(abi.RoleEvict), nil
	if err := j.start(context.Background()); err != nil {
		j.o.Log.Error("no evict policy: nothing is removed", "error", err)
		return
	}
	all := make([]*entry, 0, len(j.entries))
	for _, e := range j.entries {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b *entry) int { return cmp.Or(a.used.Compare(b.used), cmp.Compare(a.print, b.print)) })
	for _, e := range all {
		j.insert(e)
		e.told = e.used
		j.send(e, abi.OpResident)
	}
}

// forget takes an entry out whose files are gone.
func (j *Janitor) forget(who id, e *entry) {
	delete(j.entries, who)
	if e.slot == abi.None {
		return
	}
	j.send(e, abi.OpRemove)
	if e.slot < uint32(len(j.slots)) && j.slots[e.slot] == e {
		j.slots[e.slot] = nil
		j.free = append(j.free, e.slot)
	}
}
