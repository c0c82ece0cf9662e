package server

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
)

func outgoingOf(id uint64) outgoing { return outgoing{&proto.SessionResponse{Id: id}, 0} }

func nothing(int64) {}

// What is queued before Close is sent, in order, and nothing after it.
func TestSendQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newSendQueue(100, time.Second, func() { t.Error("the client is slow") }, nothing)
		var sent []uint64
		ended := make(chan error, 1)
		go func() {
			ended <- q.Run(func(m *proto.SessionResponse) error {
				sent = append(sent, m.Id)
				return nil
			})
		}()
		for id := range uint64(3) {
			q.Push(outgoingOf(id))
		}
		synctest.Wait()
		q.Push(outgoingOf(3))
		q.Close()
		q.Push(outgoingOf(4))
		if err := <-ended; err != nil || !slices.Equal(sent, []uint64{0, 1, 2, 3}) {
			t.Errorf("sent %d, %v", sent, err)
		}
	})
}

func TestSendQueueEndsWhenSendingFails(t *testing.T) {
	failed := errors.New("broken")
	q := newSendQueue(1, time.Hour, func() {}, nothing)
	q.Push(outgoingOf(1))
	if err := q.Run(func(*proto.SessionResponse) error { return failed }); !errors.Is(err, failed) {
		t.Error(err)
	}
}

// Over the limit the reader waits, and a client that reads nothing for too long is slow.
func TestSendQueueOverTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := 0
		q := newSendQueue(2, time.Second, func() { slow++ }, nothing)
		q.WaitRoom(t.Context()) // at once
		fill := func() {
			for id := range uint64(3) {
				q.Push(outgoingOf(id))
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

// What a message holds is given back once: when it is sent, when sending failed before its turn, or when it came too late.
func TestSendQueueGivesBytesBack(t *testing.T) {
	var gone []int64
	q := newSendQueue(100, time.Hour, func() {}, func(n int64) { gone = append(gone, n) })
	for id := range int64(4) {
		q.Push(outgoing{&proto.SessionResponse{Id: uint64(id)}, id + 1})
	}
	failed := errors.New("broken")
	if err := q.Run(func(m *proto.SessionResponse) error {
		if m.Id == 1 {
			q.Push(outgoing{&proto.SessionResponse{Id: 4}, 5})
			return failed
		}
		return nil
	}); !errors.Is(err, failed) {
		t.Fatal(err)
	}
	q.Push(outgoing{&proto.SessionResponse{Id: 5}, 6})
	if !slices.Equal(gone, []int64{1, 2, 3, 4, 5, 6}) {
		t.Fatalf("given back: %d", gone)
	}
}
