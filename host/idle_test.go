package host_test

import (
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// A host with session.idle_exit lives as long as a session does, and ends once it has been without one for so long.
func TestIdleExit(t *testing.T) {
	c := configuration(t)
	ended := make(chan error, 1)
	var h *host.Host
	var first *client.Session
	for c.Session.IdleExit = 2 * time.Second; first == nil; c.Session.IdleExit *= 2 {
		var err error
		h, err = host.New(t.Context(), host.Config{Config: c})
		testenv.OK(t, err)
		go func() { ended <- h.Run(t.Context()) }()
		<-h.Ready()
		hello := hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192))
		hello.Engine = "first"
		if first, err = client.Dial(t.Context(), hello); err != nil { // a slow machine: it ended before there was a session
			testenv.OK(t, <-ended)
		}
	}
	c.Session.IdleExit /= 2
	s := hosttest.Dial(t, hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192)), 8, 0, 0)
	testenv.OK(t, first.Close())
	select {
	case err := <-ended:
		t.Fatalf("the host ended with %v while a session was open", err)
	case <-time.After(c.Session.IdleExit + c.Session.IdleExit/2):
	}
	if got := s.Find(kv.Key{1}).Hits(); got != 0 {
		t.Errorf("lookup in an empty root: %d hits, want 0", got)
	}
	testenv.OK(t, s.Close())
	if err := <-ended; err != nil {
		t.Errorf("the end of an idle host: %v, want nil", err)
	}
}
