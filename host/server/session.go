package server

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
)

// stream is the server's end of the gRPC stream.
type stream interface {
	Context() context.Context
	Send(*proto.HostMessage) error
	Recv() (*proto.ClientMessage, error)
}

// session is one client process.
type session struct {
	server *Server
	stream stream
	ctx    context.Context // done when the session is to end
	end    context.CancelCauseFunc
	out    *outgoing
	number uint64 // for logs
	nonce  [proto.NonceBytes]byte

	// The reader's own.
	lastID uint64

	// Set by HELLO, before any other message is handled.
	greeted bool
	log     *slog.Logger
	engine  *engine
	ns      *chunk.Namespace
	rank    uint32 // in the engine
	piece   uint32
	tenant  uint32
	queue   queue
	device  string   // its UUID, or whatever HELLO said
	gpu     *gds.GPU // of that UUID, nil without

	// turn is held while a message is handled in order; teardown takes it for good.
	turn    sync.Mutex
	over    bool // teardown has it
	regs    map[uint32]*registration
	maps    map[fileID]*mapping
	mapped  int64
	keys    []chunk.Key // scratch of LOOKUP
	backlog chan *proto.ClientMessage
	waiting atomic.Int64 // messages given to the executor and not handled yet
	weight  atomic.Int64 // bytes that they take, by weigh
	// reserving has a token while a STORE makes room. It outlives the turn, and the session, when the job is cancelled
	// meanwhile, so at most one goroutine of a session is left to a disk that hangs.
	reserving chan struct{}

	mu          sync.Mutex
	ended       bool
	jobs        map[uint64]*job
	descriptors map[uint64]*os.File
	semaphores  *sharedSemaphores // nil before SEMAPHORES
	awaited     []awaiting
	polling     bool           // a goroutine asks for the semaphores of awaited
	waiters     sync.WaitGroup // goroutines that the end waits for; added to under mu while not ended

	unacknowledged atomic.Int64 // CANCELs and FLUSHes that such a goroutine will answer

	// The engine's mutex guards these.
	requests map[uint32]struct{}
	leases   int
}

// How many ordered messages may wait behind a STORE that makes room, and the bytes that they take together.
const (
	backlogSlots = 1 << 12
	backlogBytes = 64 << 20
)

// serve runs a session from its stream's start to its end.
func (s *Server) serve(st stream) error {
	x, err := s.admit(st)
	if err != nil {
		return err
	}
	s.work.Go(x.read)
	var executor sync.WaitGroup
	executor.Go(x.execute)
	written := make(chan struct{})
	s.work.Go(func() {
		defer close(written)
		if err := x.out.run(st.Send); err != nil {
			x.end(err)
		}
	})
	hello := time.AfterFunc(s.cfg.HelloTimeout, x.helloTimeout)
	<-x.ctx.Done()
	hello.Stop()
	executor.Wait()
	x.teardown()
	x.out.close()
	select {
	case <-written: // what was said last is on its way
	case <-time.After(time.Second):
	}
	s.dismiss(x)
	return x.verdict()
}

// verdict is the stream's status by the cause of the end. The writer, if it still hangs in a Send, ends with the stream.
func (x *session) verdict() error {
	cause := context.Cause(x.ctx)
	if errors.Is(cause, context.Canceled) {
		cause = errStreamOver
	}
	x.log.Info("session ended", "cause", cause)
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

// read hears the client until the stream or the session ends.
func (x *session) read() {
	for {
		x.out.waitRoom(x.ctx)
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
		x.receive(m)
	}
}

// execute handles the messages that could not be handled at once.
func (x *session) execute() {
	for {
		select {
		case m := <-x.backlog:
			x.inTurn(m)
			x.handled(m)
		case <-x.ctx.Done():
			return
		}
	}
}

// teardown gives up everything the session holds, in the one order that is safe.
func (x *session) teardown() {
	x.turn.Lock() // after this no message is handled: inTurn sees over
	x.over = true
	x.turn.Unlock()

	x.mu.Lock()
	x.ended = true
	jobs := make([]*job, 0, len(x.jobs))
	for _, j := range x.jobs {
		jobs = append(jobs, j)
	}
	descriptors := x.descriptors
	x.descriptors = nil
	x.mu.Unlock()
	for _, f := range descriptors {
		f.Close()
	}
	for _, j := range jobs {
		j.cancel()
	}
	for _, j := range jobs {
		j.waitFenced()
	}
	x.waiters.Wait()
	if x.engine != nil {
		x.engine.endLeases(x, 0, true)
		for _, id := range x.engine.requestsOf(x) {
			x.engine.endRequest(x, id)
		}
	}
	for _, r := range x.regs {
		x.unmapRegistration(r)
	}
	x.unshare(x.sharing())
}

// reply answers a message.
func (x *session) reply(m *proto.HostMessage) { x.out.push(m) }

func (x *session) done(id uint64) {
	x.reply(&proto.HostMessage{Id: id, Body: &proto.HostMessage_Done{Done: &proto.Done{}}})
}

func (x *session) fail(id uint64, err error) {
	x.log.Debug("message refused", "id", id, "error", err)
	x.reply(&proto.HostMessage{Id: id, Body: &proto.HostMessage_Error{Error: message(err)}})
}

// stay counts the caller among those that the session's end waits for: x.waiters.Done must follow. It refuses once the end
// has begun.
func (x *session) stay() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ended {
		return false
	}
	x.waiters.Add(1)
	return true
}

// wait runs fn on a goroutine that the session's end waits for. It reports whether the session still takes any.
func (x *session) wait(fn func()) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ended {
		return false
	}
	x.waiters.Go(fn)
	return true
}

func (x *session) helloTimeout() {
	x.turn.Lock()
	defer x.turn.Unlock()
	if !x.greeted {
		x.end(errNoHello)
	}
}
