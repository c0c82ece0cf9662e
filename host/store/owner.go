package store

// owner is what many entries have in common, so that each names it in three bytes: the class says whose namespace they are
// in and how their files are named.
type owner struct{ class, tenant uint16 }

// owners gives them numbers. None ever goes: a number of a class that is over is another class's soon.
type owners struct {
	list []owner
	ids  map[owner]uint32
}

const maxOwners = 1 << 24

func newOwners() owners { return owners{ids: map[owner]uint32{}} }

// intern is false when there are too many.
func (w *owners) intern(o owner) (uint32, bool) {
	if len(w.list) > 0 && w.list[0] == o {
		return 0, true // one of them is the usual case
	}
	id, ok := w.ids[o]
	if ok || len(w.list) == maxOwners {
		return id, ok
	}
	id = uint32(len(w.list))
	w.list = append(w.list, o)
	w.ids[o] = id
	return id, true
}

func (x *index) ownerOf(slot uint32) owner { return x.owners.list[x.at(slot).owner()] }

// isOf says whether an entry is of a class with this base.
func (x *index) isOf(e *entry, base uint16) bool {
	class := x.owners.list[e.owner()].class
	return class == base || x.base(class) == base
}

func (r *root) classOf(slot uint32) *class { return r.store.spaces.class(r.x.ownerOf(slot).class) }

func (r *root) tenantOf(slot uint32) uint32 { return r.store.spaces.tenantOf(r.x.ownerOf(slot).tenant) }
