package server

import (
	"slices"
	"sync"
)

// reserveQueue runs functions one after the other. It has a goroutine only while there are functions to run.
type reserveQueue struct {
	start func(func()) // starts a goroutine

	mu      sync.Mutex
	queue   []reservation
	running bool
	idle    []chan struct{}
}

type reservation struct {
	id  uint64
	run func()
}

// Add queues a function under the id of its message.
func (q *reserveQueue) Add(id uint64, run func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queue = append(q.queue, reservation{id, run})
	if !q.running {
		q.running = true
		q.start(q.execute)
	}
}

// Remove removes a function from the queue unless it has started.
func (q *reserveQueue) Remove(id uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queue = slices.DeleteFunc(q.queue, func(r reservation) bool { return r.id == id })
}

// Len returns the number of functions that are running or queued.
func (q *reserveQueue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(q.queue)
	if q.running {
		n++
	}
	return n
}

// Idle returns a channel that is closed when no function is running or queued.
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
		if len(q.queue) == 0 {
			q.running = false
			for _, c := range q.idle {
				close(c)
			}
			q.idle = nil
			q.mu.Unlock()
			return
		}
		next := q.queue[0]
		q.queue = slices.Delete(q.queue, 0, 1)
		q.mu.Unlock()
		next.run()
	}
}
