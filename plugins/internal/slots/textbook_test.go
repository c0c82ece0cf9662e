package slots_test

import "container/list"

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

// clock is the circle itself: frames, used bits and a hand.
type clockTextbook struct {
	frames []uint64
	used   []bool
	at     map[uint64]int
	hand   int
}

// Clock is Corbató's clock.
func Clock(capacity int) Textbook {
	return &clockTextbook{frames: make([]uint64, 0, capacity), used: make([]bool, capacity), at: map[uint64]int{}}
}

func (c *clockTextbook) Access(key uint64) (bool, []uint64) {
	if i, ok := c.at[key]; ok {
		c.used[i] = true
		return true, nil
	}
	if len(c.frames) < cap(c.frames) {
		c.at[key] = len(c.frames)
		c.frames = append(c.frames, key)
		return false, nil
	}
	for c.used[c.hand] {
		c.used[c.hand] = false
		c.hand = (c.hand + 1) % len(c.frames)
	}
	gone := c.frames[c.hand]
	delete(c.at, gone)
	c.frames[c.hand], c.at[key] = key, c.hand
	c.hand = (c.hand + 1) % len(c.frames)
	return false, []uint64{gone}
}

// sieve follows algorithm 1 line by line.
type sieveTextbook struct {
	o        *order
	visited  map[uint64]bool
	hand     *list.Element
	capacity int
}

// Sieve is the algorithm of the paper.
func Sieve(capacity int) Textbook {
	return &sieveTextbook{o: newOrder(), visited: map[uint64]bool{}, capacity: capacity}
}

func (s *sieveTextbook) Access(key uint64) (bool, []uint64) {
	if s.o.has(key) {
		s.visited[key] = true
		return true, nil
	}
	var gone []uint64
	if s.o.len() == s.capacity {
		obj := s.hand
		if obj == nil {
			obj = s.o.l.Back()
		}
		for s.visited[obj.Value.(uint64)] {
			s.visited[obj.Value.(uint64)] = false
			if obj = obj.Prev(); obj == nil {
				obj = s.o.l.Back()
			}
		}
		s.hand = obj.Prev()
		key := obj.Value.(uint64)
		delete(s.visited, key)
		s.o.remove(key)
		gone = append(gone, key)
	}
	s.o.push(key)
	return false, gone
}

// lfu looks through everything for the lowest (priority, last use).
type lfuTextbook struct {
	of       map[uint64]lfuFact
	age      uint64
	clock    uint64
	capacity int
	aging    bool
}

type lfuFact struct{ uses, priority, last uint64 }

// LFU is least frequently used; with aging it is LFU-DA.
func LFU(aging bool) func(int) Textbook {
	return func(capacity int) Textbook {
		return &lfuTextbook{of: map[uint64]lfuFact{}, capacity: capacity, aging: aging}
	}
}

func (l *lfuTextbook) Access(key uint64) (bool, []uint64) {
	f, hit := l.of[key]
	var gone []uint64
	if !hit && len(l.of) == l.capacity {
		var victim uint64
		var least lfuFact
		for k, f := range l.of {
			if victim == 0 || f.priority < least.priority || f.priority == least.priority && f.last < least.last {
				victim, least = k, f
			}
		}
		delete(l.of, victim)
		gone = append(gone, victim)
		if l.aging {
			l.age = least.priority
		}
	}
	l.clock++
	l.of[key] = lfuFact{f.uses + 1, l.age + f.uses + 1, l.clock}
	return hit, gone
}

// twoq is the paper's full version.
type twoqTextbook struct {
	in, out, main  *order
	kin, kout, all int
}

// TwoQ is 2Q with Kin 25 % and Kout 50 %.
func TwoQ(capacity int) Textbook {
	return &twoqTextbook{newOrder(), newOrder(), newOrder(), capacity / 4, capacity / 2, capacity}
}

func (q *twoqTextbook) Access(key uint64) (bool, []uint64) {
	switch {
	case q.main.has(key):
		q.main.renew(key)
		return true, nil
	case q.in.has(key):
		return true, nil
	}
	remembered := q.out.has(key)
	if remembered {
		q.out.remove(key)
	}
	var gone []uint64
	if q.in.len()+q.main.len() == q.all {
		if q.in.len() > q.kin || q.main.len() == 0 {
			gone = append(gone, q.in.pop())
			q.out.push(gone[0])
			if q.out.len() > q.kout {
				q.out.pop()
			}
		} else {
			gone = append(gone, q.main.pop())
		}
	}
	if remembered {
		q.main.push(key)
	} else {
		q.in.push(key)
	}
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
