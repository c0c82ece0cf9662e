package server

import (
	"slices"
	"testing"
	"testing/synctest"
)

// What is queued runs in order, one at a time, unless it is removed; the queue is idle after the last.
func TestReserveQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goroutines := 0
		q := newReserveQueue(func(run func()) {
			goroutines++
			go run()
		})
		<-q.Idle()
		var order []uint64
		hold := make(chan struct{})
		q.Add(1, func() {
			<-hold
			order = append(order, 1)
		})
		for id := uint64(2); id < 6; id++ {
			q.Add(id, func() { order = append(order, id) })
		}
		synctest.Wait()
		idle := q.Idle()
		q.Remove(1) // it runs
		q.Remove(3)
		q.Remove(9)
		if q.Len() != 3+1 || len(order) != 0 {
			t.Fatalf("%d ran", order)
		}
		close(hold)
		<-idle
		if q.Len() != 0 || !slices.Equal(order, []uint64{1, 2, 4, 5}) || len(q.byID) != 0 || goroutines != 1 {
			t.Fatalf("%d ran, on %d goroutines", order, goroutines)
		}
		q.Add(6, func() { order = append(order, 6) })
		<-q.Idle()
		if len(order) != 5 {
			t.Fatalf("%d ran", order)
		}
	})
}
