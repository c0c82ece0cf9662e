package sendqueue

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/proto"
)

func message(id uint64) *proto.HostMessage { return &proto.HostMessage{Id: id} }

// What is queued before Close is sent, in order, and nothing after it.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(100, time.Second, func() { t.Error("the client is slow") })
		var sent []uint64
		ended := make(chan error, 1)
		go func() {
			ended <- q.Run(func(m *proto.HostMessage) error {
				sent = append(sent, m.Id)
				return nil
			})
		}()
		for id := range uint64(3) {
			q.Push(message(id))
		}
		synctest.Wait()
		q.Push(message(3))
		q.Close()
		q.Push(message(4))
		if err := <-ended; err != nil || !slices.Equal(sent, []uint64{0, 1, 2, 3}) {
			t.Errorf("sent %d, %v", sent, err)
		}
	})
}

func TestRunEndsWhenSendingFails(t *testing.T) {
	failed := errors.New("broken")
	q := New(1, time.Hour, func() {})
	q.Push(message(1))
	if err := q.Run(func(*proto.HostMessage) error { return failed }); !errors.Is(err, failed) {
		t.Error(err)
	}
}

// Over the limit the reader waits, and a client that reads nothing for too long is slow.
func TestOverTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := 0
		q := New(2, time.Second, func() { slow++ })
		q.WaitRoom(t.Context()) // at once
		fill := func() {
			for id := range uint64(3) {
				q.Push(message(id))
			}
		}
		fill()
		room := make(chan struct{})
		go func() {
			q.WaitRoom(t.Context())
			close(room)
		}()
		synctest.Wait()
		select {
		case <-room:
			t.Error("there is room")
		default:
		}
		q.Take(nil)
		<-room
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if slow != 0 {
			t.Error("it read in time")
		}
		fill()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if slow != 1 {
			t.Errorf("slow %d times", slow)
		}
		q.Close()
	})
}
