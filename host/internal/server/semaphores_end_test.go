package server

import (
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// The end of a session gives its semaphores up only when nobody reads or writes them any more: the reader that hears
// a CANCEL, and the goroutine of a STORE that has made its room.
func TestSessionEndWaitsForItsSemaphores(t *testing.T) {
	for name, c := range map[string]struct {
		puts   int  // that the store has seen: it refuses the second
		held   bool // the STORE waits for a semaphore
		cancel bool // the STORE is cancelled while it makes room
	}{
		"cancelled before it began":    {cancel: true},
		"nothing found room":           {puts: 1},
		"held until a semaphore comes": {held: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := &fakeStore{puts: c.puts}
			if c.cancel {
				b.hold = make(chan struct{})
			}
			s := fakeServer(t, Config{}, b)
			w := newTalk(t, s, greeting("a"))
			x := only(s)
			pagesFor(t, x)
			slow := &slowSemaphores{begun: make(chan struct{}), pass: make(chan struct{})}
			x.timelines.mu.Lock()
			x.timelines.shared = &sharedSemaphores{semaphores: slow, count: 4}
			x.timelines.mu.Unlock()
			m := storeOf(1)
			timeline := &proto.Timeline{Done: 1, DoneValue: 1}
			if c.held {
				timeline.WaitValue = 1
			}
			m.GetStore().Timeline = timeline
			job := w.say(m)
			if c.cancel {
				until(t, "the store makes room", func() bool { return x.reserving.Len() > 0 })
				w.say(cancelOf(job))
			}
			<-slow.begun
			x.end(errClientDone)
			until(t, "the session's end has begun", func() bool {
				x.jobs.mu.Lock()
				defer x.jobs.mu.Unlock()
				return x.jobs.ended
			})
			select {
			case err := <-w.end:
				t.Errorf("the session gave its semaphores up in the middle of an access (%v)", err)
				w.end <- nil
			case <-time.After(20 * time.Millisecond):
			}
			close(slow.pass)
			testenv.NoError(t, <-w.end)
		})
	}
}

// slowSemaphores hold every access up, and say when one has begun.
type slowSemaphores struct {
	once  sync.Once
	begun chan struct{}
	pass  chan struct{}
}

func (w *slowSemaphores) hold() {
	w.once.Do(func() { close(w.begun) })
	<-w.pass
}

func (w *slowSemaphores) Load(int) (uint64, error) {
	w.hold()
	return 0, nil
}

func (w *slowSemaphores) Store(int, uint64) error {
	w.hold()
	return nil
}
