package moves

import (
	"container/list"
	"math"
)

// classes are how many values of moves the queue tells apart: each is of twice the value of the one before. The last is of those that
// are not wanted any more, which cost nothing.
const classes = 8

// lane is the moves of one level as the farther one. It has workers, a queue and a bound for itself. The mover's mu guards it.
type lane struct {
	queue   [classes]list.List // of waiter, oldest first
	of      map[Move]*list.Element
	waiting int64 // bytes of what waits, also of again
	moves   int   // that wait or run

	// Of the last moves, each counting less than the next one.
	copied, took float64 // bytes, seconds
}

// waiter is a move in a queue.
type waiter struct {
	v     Move
	class int
	bytes int64
}

// class is that of a move's value.
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

// pop takes the oldest of the most valuable moves; nil when none waits.
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

// changed gives a move that waits its place anew.
func (l *lane) changed(v Move) {
	if at := l.of[v]; at != nil && class(v) != at.Value {
		l.remove(at)
		l.push(v)
	}
}

// shed takes the latest of the moves that are worth less than one of a class; nil when none is.
func (l *lane) shed(below int) Move {
	for n := range below {
		if last := l.queue[n].Back(); last != nil {
			l.moves--
			return l.remove(last)
		}
	}
	return nil
}

// prune takes the moves of which gone says so.
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

// ran counts a move that was made.
func (l *lane) ran(bytes int64, seconds float64) {
	const fades = 0.95
	l.copied, l.took = fades*l.copied+float64(bytes), fades*l.took+seconds
}

// speed is the bytes per second of one worker by the last moves, or else as assumed.
func (l *lane) speed(assumed float64) float64 {
	if l.took == 0 {
		return assumed
	}
	return l.copied / l.took
}
