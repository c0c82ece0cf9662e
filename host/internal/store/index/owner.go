package index

// Owner is what many entries have in common, so that an entry names it in three bytes. The class says in which
// namespace and group the entries are and who named their files.
type Owner struct{ Class, Tenant uint16 }

// ownerTable numbers owners. A number is never freed: the number of a class that has ended is soon another class's.
type ownerTable struct {
	list []Owner
	ids  map[Owner]uint32
}

// MaxOwners bounds the numbers of owners; itself it is nobody's.
const MaxOwners = 1 << 24

func newOwnerTable() ownerTable { return ownerTable{ids: map[Owner]uint32{}} }

// InternOwner returns the number of an owner. It is false when there are too many.
func (t *ownerTable) InternOwner(o Owner) (uint32, bool) {
	if len(t.list) > 0 && t.list[0] == o {
		return 0, true // a root with one owner is the usual case
	}
	id, ok := t.ids[o]
	if ok || len(t.list) == MaxOwners {
		return id, ok
	}
	id = uint32(len(t.list))
	t.list = append(t.list, o)
	t.ids[o] = id
	return id, true
}

// Owners are all owners by number, also those that no entry has any more. The list must not be changed.
func (t *ownerTable) Owners() []Owner { return t.list }

// Owner is the owner of the entry in a slot.
func (x *Index) Owner(slot uint32) Owner { return x.list[x.At(slot).OwnerID()] }

// HasBase says whether an entry is of a class with this base.
func (x *Index) HasBase(e *Entry, base uint16) bool {
	class := x.list[e.OwnerID()].Class
	return class == base || x.base(class) == base
}
