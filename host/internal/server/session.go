package server

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// session is the connection to one client process, with all state that belongs to it.
type session struct {
	server *Server
	cfg    *Config // configuration at the start of the session
	line
	greeted
	profile atomic.Pointer[profile] // noProfile before HELLO

	inbox     *inbox
	jobs      *jobTable
	memory    *clientMemory
	timelines *timelines
	// reserving runs the reservations of checked STOREs, one at a time. A reservation may outlive its job and the session if
	// the job is cancelled. Since there is only one at a time, a session leaves at most one goroutine behind on a disk that
	// hangs.
	reserving *reserveQueue
	lookups   lookups
	granted   *granted
}

// greeted is the identity that HELLO gave. It is set before any other message is handled.
type greeted struct {
	engine *servingEngine // nil before HELLO
	ns     *kv.Namespace
	rank   uint32 // rank of the session in its engine
	piece  uint32 // first piece of an entry that the rank stores and loads
	units  uint32 // number of such pieces
	tenant uint32
	queue  *transfer.Queue // queue of the client's device
}

// lookups is the state of a session's LOOKUPs. It is guarded by the turn.
type lookups struct {
	keys   []kv.Key  // scratch memory of the current LOOKUP
	asking []*asking // LOOKUPs that wait for peers
}

// asking is a LOOKUP that waits for peers. The session's other messages do not wait for it.
type asking struct {
	request uint32
	ended   bool // the request has ended: the answer grants nothing
}

func (s *Server) newSession(st stream) (*session, error) {
	number := s.number.Add(1)
	sh, err := s.budgets.New(number)
	if err != nil {
		return nil, err
	}
	cfg := s.current.Load()
	x := &session{
		server: s, cfg: cfg, line: line{stream: st, number: number, share: sh, log: s.cfg.Log.With("session", number)},
		jobs:      &jobTable{limit: cfg.Limits.Jobs, jobs: map[uint64]*job{}},
		granted:   &granted{limits: &cfg.Limits, leaseTTL: cfg.LeaseTTL, share: sh, requests: map[uint32]struct{}{}},
		reserving: &reserveQueue{start: s.work.Go},
	}
	x.ctx, x.end = context.WithCancelCause(st.Context())
	x.out = newSendQueue(cfg.Limits.Outgoing, s.cfg.SlowTimeout, func() { x.end(errSlow) }, sh.Sent)
	x.profile.Store(noProfile)
	x.inbox = &inbox{handle: x.handle, drop: x.drop, backlog: make(chan *proto.SessionRequest, backlogSlots)}
	peer := socket.Caller(st.Context())
	x.memory = &clientMemory{
		limits: &cfg.Limits, total: &s.mapped, gpus: s.cfg.GPUs, share: sh, log: x.log, protect: s.protect,
		uid: peer.UID, trusted: peer.Operator(),
		regs: map[uint32]*registration{}, files: map[fileID]*mapping{}, descriptors: map[uint64]*os.File{},
	}
	x.timelines = &timelines{ctx: x.ctx, log: x.log, memory: x.memory, jobs: x.jobs, limit: cfg.MaxWait}
	return x, nil
}

// serve runs a session from the start of its stream to its end.
func (s *Server) serve(st stream) error {
	x, err := s.admit(st)
	if err != nil {
		return err
	}
	s.work.Go(x.read)
	var executor sync.WaitGroup
	executor.Go(func() { x.inbox.Execute(x.ctx) })
	written := make(chan struct{})
	s.work.Go(func() {
		defer close(written)
		if err := x.out.Run(st.Send); err != nil {
			x.end(err)
		}
	})
	hello := time.AfterFunc(s.cfg.HelloTimeout, x.helloTimeout)
	<-x.ctx.Done()
	hello.Stop()
	executor.Wait()
	x.teardown()
	x.out.Close()
	select {
	case <-written: // the last messages have been sent
	case <-time.After(time.Second):
	}
	s.dismiss(x)
	cause := context.Cause(x.ctx)
	if errors.Is(cause, context.Canceled) {
		cause = errStreamOver
	}
	x.log.Info("session ended", "cause", cause)
	return streamStatus(cause)
}

// streamStatus returns the status of a stream for the cause of its session's end. Returning it also ends a writer that hangs in
// Send.
func streamStatus(cause error) error {
	switch {
	case errors.Is(cause, errClientDone):
		return nil
	case errors.Is(cause, errRefused), errors.Is(cause, errNoHello):
		return status.Error(codes.FailedPrecondition, cause.Error())
	case errors.Is(cause, errSlow):
		return status.Error(codes.ResourceExhausted, cause.Error())
	case errors.Is(cause, ErrClosing):
		return status.Error(codes.Unavailable, cause.Error())
	}
	return status.Error(codes.Aborted, cause.Error())
}

// read receives messages until the stream or the session ends.
func (x *session) read() {
	for {
		x.out.WaitRoom(x.ctx)
		m, err := x.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			x.end(errClientDone)
			return
		case err != nil:
			x.end(err)
			return
		case x.ctx.Err() != nil:
			return
		}
		since := time.Now()
		x.receive(m)
		if d := x.share.Spent(since); d > 0 {
			x.profile.Load().usage.Paused.Add(int64(d))
			select {
			case <-time.After(d):
			case <-x.ctx.Done():
			}
		}
	}
}

// teardown releases everything that the session holds. The order matters: see the package documentation.
func (x *session) teardown() {
	x.inbox.Close()
	jobs := x.jobs.end()
	x.memory.closeDescriptors()
	for _, j := range jobs {
		j.cancel()
	}
	for _, j := range jobs {
		j.waitFenced()
	}
	x.jobs.waiters.Wait()
	if x.engine != nil {
		x.engine.endLeases(x.granted, 0, true)
		for _, id := range x.engine.requestsOf(x.granted) {
			x.engine.endRequest(x.granted, id, abi.Hints{})()
		}
	}
	x.memory.close()
	x.memory.unmapSemaphores(x.timelines.semaphores())
	x.memory.unmapSemaphores(x.memory.withdrawals)
}

// refuse answers a message with an error and records a span for it.
func (x *session) refuse(m *proto.SessionRequest, err error) {
	x.fail(m.Id, err)
	x.server.cfg.Spans.Refused(x.profile.Load().spans, m, message(err))
}

func (x *session) helloTimeout() {
	x.inbox.Turn.Lock()
	defer x.inbox.Turn.Unlock()
	if x.engine == nil {
		x.end(errNoHello)
	}
}
