package server

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// stream is the server's end of the gRPC stream.
type stream interface {
	Context() context.Context
	Send(*proto.SessionResponse) error
	Recv() (*proto.SessionRequest, error)
}

// session is one client process.
type session struct {
	server *Server
	cfg    *Config // as the session began
	stream stream
	ctx    context.Context // done when the session is to end
	end    context.CancelCauseFunc
	log    *slog.Logger
	number uint64 // for logs
	nonce  [proto.NonceBytes]byte
	lastID uint64 // of the reader

	out       *sendQueue
	inbox     *inbox
	jobs      *jobTable
	memory    *clientMemory
	timelines *timelines
	share     *budget.Session

	// Set by HELLO, before any other message is handled.
	engine  *servingEngine
	ns      *kv.Namespace
	rank    uint32 // in the engine
	piece   uint32
	tenant  uint32
	queue   *transfer.Queue
	profile atomic.Pointer[profile] // noProfile before HELLO

	keys   []kv.Key  // scratch of LOOKUP, used with the turn held
	asking []*asking // LOOKUPs that a peer is asked for, used with the turn held
	// reserving has the STOREs that are checked. A reservation outlives its job, and the session, if the job is
	// cancelled; there is one at a time, so that a session leaves no more than one goroutine to a disk that hangs.
	reserving *reserveQueue

	granted granted
}

// granted is what a session has of its engine; the engine's mutex guards it.
type granted struct {
	requests map[uint32]struct{}
	leases   int
}

func (s *Server) newSession(st stream) (*session, error) {
	number := s.number.Add(1)
	sh, err := s.budgets.New(number)
	if err != nil {
		return nil, err
	}
	cfg := s.current.Load()
	x := &session{
		server: s, cfg: cfg, stream: st, number: number, share: sh,
		jobs: &jobTable{limit: cfg.Limits.Jobs, jobs: map[uint64]*job{}}, granted: granted{requests: map[uint32]struct{}{}},
		reserving: &reserveQueue{start: s.work.Go},
	}
	x.log = s.cfg.Log.With("session", x.number)
	x.ctx, x.end = context.WithCancelCause(st.Context())
	x.out = newSendQueue(cfg.Limits.Outgoing, s.cfg.SlowTimeout, func() { x.end(errSlow) }, sh.Sent)
	x.profile.Store(noProfile)
	x.inbox = &inbox{handle: x.handle, drop: x.drop, backlog: make(chan *proto.SessionRequest, backlogSlots)}
	x.memory = newClientMemory(s, cfg, sh, x.log)
	peer := socket.Caller(st.Context())
	x.memory.uid, x.memory.trusted = peer.UID, peer.Operator()
	x.timelines = &timelines{ctx: x.ctx, log: x.log, memory: x.memory, jobs: x.jobs, limit: cfg.MaxWait}
	return x, nil
}

// serve runs a session from its stream's start to its end.
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
	case <-written: // the last messages are on their way
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

// streamStatus is the stream's status for the cause of a session's end. A writer that hangs in Send ends with the
// stream.
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

// read receives the client's messages until the stream or the session ends.
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

// teardown releases everything that the session holds, in the only safe order.
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
		x.engine.endLeases(x, 0, true)
		for _, id := range x.engine.requestsOf(x) {
			x.engine.endRequest(x, id, abi.Hints{})()
		}
	}
	x.memory.close()
	x.memory.unmapSemaphores(x.timelines.semaphores())
}

func (x *session) reply(m *proto.SessionResponse) {
	var bytes int64
	switch m.Body.(type) {
	case *proto.SessionResponse_StoreRead, *proto.SessionResponse_LoadLayer: // more answers follow
	default:
		bytes = x.share.Answered(m.Id)
	}
	x.out.Push(outgoing{SessionResponse: m, Bytes: bytes})
}

func (x *session) done(id uint64) {
	x.reply(&proto.SessionResponse{Id: id, Body: &proto.SessionResponse_Done{Done: &proto.Done{}}})
}

// doneUnless answers Done unless err is set, which it returns.
func (x *session) doneUnless(id uint64, err error) error {
	if err == nil {
		x.done(id)
	}
	return err
}

func (x *session) fail(id uint64, err error) { x.reply(x.refusal(id, err)) }

// refuse is fail, for a message that may have a span.
func (x *session) refuse(m *proto.SessionRequest, err error) {
	x.fail(m.Id, err)
	x.server.cfg.Spans.Refused(x.profile.Load().spans, m, message(err))
}

func (x *session) refusal(id uint64, err error) *proto.SessionResponse {
	x.log.Debug("message refused", "id", id, "error", err)
	return &proto.SessionResponse{Id: id, Body: &proto.SessionResponse_Error{Error: message(err)}}
}

func (x *session) helloTimeout() {
	x.inbox.Turn.Lock()
	defer x.inbox.Turn.Unlock()
	if x.engine == nil {
		x.end(errNoHello)
	}
}
