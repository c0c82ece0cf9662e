package slots_test

import "container/list"

// order is a list of keys with an index: the front is the newest.
type order struct {
	l  *list.List
	at map[uint64]*list.Element
}

func newOrder() *order { return &order{l: list.New(), at: map[uint64]*list.Element{}} }

func (o *order) has(key uint64) bool { return o.at[key] != nil }
func (o *order) len() int            { return o.l.Len() }
func (o *order) push(key uint64)     { o.at[key] = o.l.PushFront(key) }
func (o *order) oldest() uint64      { return o.l.Back().Value.(uint64) }

func (o *order) remove(key uint64) {
	o.l.Remove(o.at[key])
	delete(o.at, key)
}

func (o *order) pop() uint64 {
	key := o.oldest()
	o.remove(key)
	return key
}

func (o *order) renew(key uint64) {
	o.remove(key)
	o.push(key)
}
