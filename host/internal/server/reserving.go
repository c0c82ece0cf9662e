package server

import (
	"container/list"
	"sync"
)

// reserveQueue is what is to run. It has a goroutine only while there is something.
type reserveQueue struct {
	start func(func()) // starts the goroutine

	mu      sync.Mutex
	list    list.List // of reservation
	byID    map[uint64]*list.Element
	running bool
	idle    []chan struct{}
}

type reservation struct {
	id  uint64
	run func()
}

// newReserveQueue makes a queue; start starts its goroutine.
func newReserveQueue(start func(func())) *reserveQueue {
	return &reserveQueue{start: start, byID: map[uint64]*list.Element{}}
}

// Add queues a function under the id of its message.
func (q *reserveQueue) Add(id uint64, run func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.byID[id] = q.list.PushBack(reservation{id, run})
	if !q.running {
		q.running = true
		q.start(q.execute)
	}
}

// Remove takes a function out of the queue, unless it runs already.
func (q *reserveQueue) Remove(id uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if e := q.byID[id]; e != nil {
		q.list.Remove(e)
		delete(q.byID, id)
	}
}

// Len is how many functions run or are to run.
func (q *reserveQueue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := q.list.Len()
	if q.running {
		n++
	}
	return n
}

// Idle is closed when nothing runs nor is to run.
func (q *reserveQueue) Idle() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	c := make(chan struct{})
	if q.running {
		q.idle = append(q.idle, c)
	} else {
		close(c)
	}
	return c
}

func (q *reserveQueue) execute() {
	for {
		q.mu.Lock()
		e := q.list.Front()
		if e == nil {
			q.running = false
			for _, c := range q.idle {
				close(c)
			}
			q.idle = nil
			q.mu.Unlock()
			return
		}
		next := q.list.Remove(e).(reservation)
		delete(q.byID, next.id)
		q.mu.Unlock()
		next.run()
	}
}
