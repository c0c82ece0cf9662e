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

// LRU and FIFO.
type queue struct {
	o        *order
	capacity int
	renew    bool
}

// LRU is least recently used.
func LRU(capacity int) Textbook { return &queue{newOrder(), capacity, true} }

// FIFO is first in first out.
func FIFO(capacity int) Textbook { return &queue{newOrder(), capacity, false} }

func (q *queue) Access(key uint64) (bool, []uint64) {
	if q.o.has(key) {
		if q.renew {
			q.o.renew(key)
		}
		return true, nil
	}
	var gone []uint64
	if q.o.len() == q.capacity {
		gone = append(gone, q.o.pop())
	}
	q.o.push(key)
	return false, gone
}

// s3fifo is algorithm 1.
type s3fifoTextbook struct {
	small, main, ghost *order
	freq               map[uint64]int
	s, all             int
}

// S3FIFO is S3-FIFO with a small queue of 10 %.
func S3FIFO(capacity int) Textbook {
	return &s3fifoTextbook{newOrder(), newOrder(), newOrder(), map[uint64]int{}, capacity / 10, capacity}
}

func (q *s3fifoTextbook) Access(key uint64) (bool, []uint64) {
	if q.small.has(key) || q.main.has(key) {
		q.freq[key] = min(q.freq[key]+1, 3)
		return true, nil
	}
	var gone []uint64
	for q.small.len()+q.main.len() == q.all {
		if q.small.len() > 0 && (q.small.len() >= q.s || q.main.len() == 0) {
			gone = append(gone, q.evictSmall()...)
		} else {
			gone = append(gone, q.evictMain())
		}
	}
	if q.ghost.has(key) {
		q.ghost.remove(key)
		q.main.push(key)
	} else {
		q.small.push(key)
	}
	q.freq[key] = 0
	return false, gone
}

func (q *s3fifoTextbook) evictSmall() []uint64 {
	for q.small.len() > 0 && (q.small.len() >= q.s || q.main.len() == 0) {
		key := q.small.pop()
		if q.freq[key] > 1 {
			q.freq[key] = 0
			q.main.push(key)
			continue
		}
		delete(q.freq, key)
		q.ghost.push(key)
		if q.ghost.len() > q.all-q.s {
			q.ghost.pop()
		}
		return []uint64{key}
	}
	return nil
}

func (q *s3fifoTextbook) evictMain() uint64 {
	for {
		key := q.main.pop()
		if q.freq[key] == 0 {
			delete(q.freq, key)
			return key
		}
		q.freq[key]--
		q.main.push(key)
	}
}
