package moves

import (
	"container/list"
	"math"
)

// classes is the number of value classes in the queue. Each class has twice the value of the class below. The highest class is
// for moves that are no longer wanted, since ending them costs nothing.
const classes = 8

// lane holds the moves with the same farther level. It has its own workers, queue and bound. It is guarded by the mover's mu.
type lane struct {
	queue   [classes]list.List // elements are waiters, oldest first
	of      map[Move]*list.Element
	waiting int64 // bytes of waiting moves, including those in again
	moves   int   // moves that wait or run

	// Sums over the last moves. Older moves count less.
	copied, took float64 // bytes and seconds
}

// waiter is a move in a queue.
type waiter struct {
	v     Move
	class int
	bytes int64
}

// class returns a waiter for the move with the class of its value.
func class(v Move) waiter {
	if v.Cancelled() {
		return waiter{v, classes - 1, 0}
	}
	return waiter{v, min(max(0, 2+int(math.Floor(math.Log2(v.Value())))), classes-2), v.Bytes()}
}

func (l *lane) push(v Move) {
	w := class(v)
	l.waiting += w.bytes
	l.of[v] = l.queue[w.class].PushBack(w)
}

// pop removes and returns the oldest of the most valuable moves, or nil if none waits.
func (l *lane) pop() Move {
	for n := classes - 1; n >= 0; n-- {
		if first := l.queue[n].Front(); first != nil {
			return l.remove(first)
		}
	}
	return nil
}

func (l *lane) remove(at *list.Element) Move {
	w := at.Value.(waiter)
	l.queue[w.class].Remove(at)
	l.waiting -= w.bytes
	delete(l.of, w.v)
	return w.v
}

// changed requeues a waiting move after a change of its value.
func (l *lane) changed(v Move) {
	if at := l.of[v]; at != nil && class(v) != at.Value {
		l.remove(at)
		l.push(v)
	}
}

// shed removes and returns the latest of the least valuable moves below a class, or nil if there is none.
func (l *lane) shed(below int) Move {
	for n := range below {
		if last := l.queue[n].Back(); last != nil {
			l.moves--
			return l.remove(last)
		}
	}
	return nil
}

// prune removes and returns the moves for which gone returns true.
func (l *lane) prune(gone func(Move) bool) (list []Move) {
	for n := range l.queue {
		for at := l.queue[n].Front(); at != nil; {
			next := at.Next()
			if v := at.Value.(waiter).v; gone(v) {
				l.moves--
				list = append(list, l.remove(at))
			}
			at = next
		}
	}
	return list
}

// ran counts a move that has run.
func (l *lane) ran(bytes int64, seconds float64) {
	const fades = 0.95
	l.copied, l.took = fades*l.copied+float64(bytes), fades*l.took+seconds
}

// speed returns the bytes a second of one worker over the last moves, or assumed if there were none.
func (l *lane) speed(assumed float64) float64 {
	if l.took == 0 {
		return assumed
	}
	return l.copied / l.took
}
