package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// Hello identifies a session.
type Hello struct {
	Socket     string // path of the host's socket
	Engine     string // common name of all sessions of an engine, which has one for each of its ranks
	Role       string // role, for logs
	Rank       uint32 // rank among all ranks that follow from the namespace's parallel sizes
	LocalRanks uint32 // ranks on this machine; 0 means 1
	Namespace  kv.Namespace
	Tenant     uint32 // tenant to which the session's chunks are charged
	DeviceUUID string // GPU with the engine's pages; empty means host memory
	// UnsealedMemory allows arenas of [OpenArena] that are not sealed against shrinking. The client bears the risk.
	UnsealedMemory bool
	// HostUsers are users that may be the host, in addition to root, this process's user, and a user to whom root has given the
	// socket's directory.
	HostUsers []uint32
}

// Host is the host's answer to HELLO.
type Host struct {
	Version  string
	LeaseTTL time.Duration
	Limits   Limits
	Session  uint64 // number of the session in the host's log
	Levels   int    // number of levels of roots
	PinBytes int64  // bytes that leases with LookupRequest.Pin may keep, over all engines
}

// Limits are the host's limits for one session. 0 means that the host does not report the limit.
type Limits struct {
	KeysPerLookup, ChunksPerJob int
	MessageBytes                int
	Jobs, Leases                int // at a time
	Requests                    int // requests that have begun and not ended
	ArenaBytes                  int64
}

// Session is a session with a host. It is safe for concurrent use.
type Session struct {
	foreign *atomic.Pointer[error] // why the socket is not the host's
	hello   Hello
	host    Host
	conn    *grpc.ClientConn
	stub    proto.EngineServiceClient
	stream  grpc.BidiStreamingClient[proto.SessionRequest, proto.SessionResponse]
	cancel  context.CancelFunc
	ended   chan struct{} // closed when the receiver has ended and every call has been answered

	nonce       []byte
	descriptors string // path of the descriptor socket

	send   sync.Mutex // held while a message is sent, so that ids are sent in ascending order
	lastID uint64

	mu    sync.Mutex
	calls map[uint64]call // by message id; nil after the session has ended
	cause error           // why the session has ended
	tag   uint64

	withdrawn atomic.Pointer[uint64] // nil if stores cannot be withdrawn
}

// call receives the messages with its id. Its methods are called on the receiver's goroutine.
type call interface {
	// answer reports whether the call is complete.
	answer(*proto.SessionResponse) bool
	// lost is called instead of answer if no further answer will come.
	lost(error)
}

const (
	maxMessage   = 64 << 20
	streamWindow = 1 << 20
	connWindow   = 4 << 20
	ioBuffer     = 128 << 10 // large enough for a lookup of several thousand keys
)

// Dial opens a session. The context only limits the time for this.
func Dial(ctx context.Context, h Hello) (*Session, error) {
	if h.LocalRanks == 0 {
		h.LocalRanks = 1
	}
	if err := h.Namespace.Validate(); err != nil {
		return nil, err
	}
	var foreign atomic.Pointer[error] // gRPC passes on only the text of an error
	conn, err := grpc.NewClient("passthrough:///kvhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the Unix socket has mode 0600
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := h.dial(ctx, h.Socket)
			if errors.Is(err, ErrForeign) {
				foreign.Store(&err)
			}
			return c, err
		}),
		grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithReadBufferSize(ioBuffer), grpc.WithWriteBufferSize(ioBuffer),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithIdleTimeout(0),
	)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrHostGone, h.Socket, err)
	}
	s := &Session{hello: h, conn: conn, foreign: &foreign, stub: proto.NewEngineServiceClient(conn), calls: map[uint64]call{}, ended: make(chan struct{})}
	streamCtx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	if s.stream, err = s.stub.Session(streamCtx); err != nil {
		cancel()
		conn.Close()
		return nil, s.dialError(ctx, err)
	}
	go s.receive()
	if err := s.greet(ctx); err != nil {
		s.Close()
		return nil, s.dialError(ctx, err)
	}
	if !stop() { // the context has just ended, and the stream with it
		s.Close()
		return nil, ctx.Err()
	}
	return s, nil
}

func (s *Session) dialError(ctx context.Context, err error) error {
	var refused *HostError
	foreign := s.foreign.Load()
	switch {
	case foreign != nil:
		return *foreign
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &refused), errors.Is(err, ErrHostGone), errors.Is(err, ErrVersion):
		return fmt.Errorf("%s: %w", s.hello.Socket, err)
	}
	return s.gone(err)
}

// gone returns the error for a stream that has ended.
func (s *Session) gone(err error) error {
	if err = proto.Plain(s.hello.Socket, err); errors.Is(err, proto.ErrVersion) {
		return fmt.Errorf("%w: %w", ErrVersion, err)
	}
	return fmt.Errorf("%w: %w", ErrHostGone, err)
}

func (s *Session) greet(ctx context.Context) error {
	h := &s.hello
	m, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Hello{Hello: &proto.Hello{
		Protocol: proto.Protocol, Engine: h.Engine, Role: h.Role, Rank: h.Rank, LocalRanks: h.LocalRanks,
		DeviceUuid: h.DeviceUUID, Namespace: proto.FromNamespace(&h.Namespace), Tenant: h.Tenant,
		UnsealedMemory: h.UnsealedMemory,
	}}})
	if err != nil {
		return err
	}
	r := m.GetHello()
	if len(r.GetNonce()) != proto.NonceBytes || r.GetKeyBytes() != uint32(h.Namespace.KeyBytes) ||
		r.GetProtocol() != proto.Protocol {
		return fmt.Errorf("%w: %w: it answers HELLO with protocol %d, and %d bytes of key", ErrVersion, proto.ErrVersion, r.GetProtocol(), r.GetKeyBytes())
	}
	if units := h.Namespace.Units; int(r.GetUnits()) != units {
		return fmt.Errorf("%w: %w: it knows no units, and the namespace has %d", ErrVersion, proto.ErrVersion, units)
	}
	s.nonce, s.descriptors = r.GetNonce(), h.Socket+proto.DescriptorSuffix
	s.host = Host{
		Version: r.GetVersion(), Levels: int(r.GetLevels()), PinBytes: int64(r.GetPinBytes()), LeaseTTL: r.GetLeaseTime().AsDuration(),
		Session: r.GetSession(),
	}
	l := r.GetLimits()
	s.host.Limits = Limits{
		KeysPerLookup: int(l.GetKeysPerLookup()), ChunksPerJob: int(l.GetChunksPerJob()), MessageBytes: int(l.GetMessageBytes()),
		Jobs: int(l.GetJobs()), Leases: int(l.GetLeases()), Requests: int(l.GetRequests()), ArenaBytes: int64(l.GetArenaBytes()),
	}
	return nil
}

// Host returns the host's answer to Hello.
func (s *Session) Host() Host { return s.host }

// closeTimeout is the time that the host has to end a session that is being closed. After it, the stream is broken.
const closeTimeout = 5 * time.Second

// Close ends the session. The host cancels its jobs and unmaps its memory, and outstanding calls end with ErrClosed.
// Arenas stay mapped in this process until they are closed.
func (s *Session) Close() error {
	s.mu.Lock()
	if s.cause == nil {
		s.cause = ErrClosed
	}
	s.mu.Unlock()
	if s.send.TryLock() { // otherwise a message hangs in the stream
		_ = s.stream.CloseSend() // never fails
		s.send.Unlock()
		select {
		case <-s.ended:
		case <-time.After(closeTimeout):
		}
	}
	s.cancel()
	<-s.ended
	return s.conn.Close()
}

// Ended returns a channel that is closed when the session has ended. Err then returns the reason.
func (s *Session) Ended() <-chan struct{} { return s.ended }

// Err returns the reason for the end of the session, or nil.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause
}

// over ends every call. The first cause is kept. Only the receiver calls it, so that each call gets either its answer
// or the loss.
func (s *Session) over(cause error) {
	s.mu.Lock()
	if s.cause == nil {
		s.cause = cause
	}
	cause = s.cause
	calls := s.calls
	s.calls = nil
	s.mu.Unlock()
	for _, c := range calls {
		c.lost(cause)
	}
}

// receive is the session's receiver. It ends with the stream.
func (s *Session) receive() {
	defer close(s.ended)
	for {
		m, err := s.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("it ended the session")
			}
			s.over(s.gone(err))
			return
		}
		s.mu.Lock()
		c, closed := s.calls[m.GetId()], s.cause != nil
		s.mu.Unlock()
		if c != nil && !closed && c.answer(m) {
			s.drop(m.GetId())
		}
	}
}

func (s *Session) drop(id uint64) {
	s.mu.Lock()
	delete(s.calls, id)
	s.mu.Unlock()
}

// start enters a call and sends its message.
func (s *Session) start(m *proto.SessionRequest, c call) (uint64, error) {
	s.send.Lock()
	defer s.send.Unlock()
	s.lastID++
	m.Id = s.lastID
	if n, limit := protobuf.Size(m), s.maxMessage(); n > limit { // a larger message would end the stream
		return 0, fmt.Errorf("%w: a message of %d bytes, at most %d", ErrLimit, n, limit)
	}
	s.mu.Lock()
	if s.calls == nil {
		err := s.cause
		s.mu.Unlock()
		return 0, err
	}
	s.calls[m.Id] = c
	s.mu.Unlock()
	if err := s.stream.Send(m); err != nil {
		s.drop(m.Id)
		<-s.ended // sending fails only after the stream has ended, and the receiver knows the reason
		return 0, s.Err()
	}
	return m.Id, nil
}

// maxMessage returns the size of the largest message that the host accepts. It is unknown before HELLO is answered.
func (s *Session) maxMessage() int {
	if n := s.host.Limits.MessageBytes; n > 0 {
		return min(n, maxMessage)
	}
	return maxMessage
}

// one is a call with a single answer.
type one chan reply

type reply struct {
	m   *proto.SessionResponse
	err error
}

func (o one) answer(m *proto.SessionResponse) bool {
	if l := m.GetLookup(); l.GetPending() {
		return false // this is not the final answer
	}
	if e := m.GetError(); e != nil {
		o <- reply{err: refusal(e)}
	} else {
		o <- reply{m: m}
	}
	return true
}

func (o one) lost(err error) { o <- reply{err: err} }

// ask sends a message and waits for its only answer.
func (s *Session) ask(ctx context.Context, m *proto.SessionRequest) (*proto.SessionResponse, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	o := make(one, 1)
	m.Traceparent = traceparentOf(ctx)
	if _, err := s.start(m, o); err != nil {
		return nil, err
	}
	select {
	case r := <-o:
		return r.m, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Ping returns when the host has answered.
func (s *Session) Ping(ctx context.Context) error {
	_, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Ping{Ping: &proto.Ping{}}})
	return err
}

// AwaitCopies returns when no copy of the jobs sent so far can touch their blocks any more. The jobs keep running.
func (s *Session) AwaitCopies(ctx context.Context) error {
	_, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_AwaitCopies{AwaitCopies: &proto.AwaitCopies{}}})
	return err
}
