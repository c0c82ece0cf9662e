package server

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sync/semaphore"
)

// Server serves sessions on a Unix socket.
type Server struct {
	cfg     Config
	current atomic.Pointer[Config] // cfg with the changes of Reload; a session keeps the configuration that it started with
	store   chunkStore
	started time.Time
	epoch   uint64 // identifies this run for readers of events

	budgets budget.Sessions
	effort  *arrivals.Effort    // limits what arrives for no session
	aside   *semaphore.Weighted // half of the processors, for event streams, which are not urgent

	mapped  atomic.Int64 // bytes of all mappings
	protect func([]byte) error
	jobs    atomic.Int64
	request requestNumbers
	number  atomic.Uint64
	leases  atomic.Uint64
	greed   greed
	work    sync.WaitGroup // readers, writers and jobs

	latencies Latencies
	usage     UsageTable

	mu       sync.Mutex
	sockets  *socket.Pair // nil while the server does not listen
	path     string
	closing  bool
	quit     chan struct{} // closed by Close
	ready    chan struct{} // closed when clients can connect
	served   chan struct{} // closed when Serve has returned; nil before Serve
	engines  map[engineKey]*servingEngine
	sessions map[[proto.NonceBytes]byte]*session
	empty    chan struct{} // closed when the server is closing and the last session is gone
}

// chunkStore is the part of [store.Store] that sessions use. Tests wrap it to inject rare behaviour of disks.
type chunkStore interface {
	Namespace(ctx context.Context, ns *kv.Namespace) (*catalog.Namespace, error)
	Lookup(q store.LookupRequest) (*store.Lease, error)
	Put(ctx context.Context, q store.PutRequest) (*store.Put, error)
	Discard(q store.DiscardRequest) ([]store.DiscardResult, error)
	EndRequest(request uint32, hints abi.Hints)
	eventSource
}

// New returns a server. Serve runs it.
func New(cfg Config) *Server { return newServer(cfg, cfg.Store) }

func newServer(cfg Config, st chunkStore) *Server {
	cfg = cfg.orDefaults()
	cfg.Limits.MessageBytes = min(cfg.Limits.MessageBytes, arrivals.LargestMessage(cfg.Arriving.Alone()))
	s := &Server{
		cfg: cfg, store: st, budgets: cfg.budgets(), effort: arrivals.NewEffort(), protect: protect, started: time.Now(), epoch: uint64(time.Now().UnixNano()),
		aside: semaphore.NewWeighted(int64(max(1, runtime.GOMAXPROCS(0)/2))),
		quit:  make(chan struct{}), ready: make(chan struct{}), empty: make(chan struct{}),
		engines: map[engineKey]*servingEngine{}, sessions: map[[proto.NonceBytes]byte]*session{},
	}
	s.current.Store(&cfg)
	return s
}

// ioBuffer is the size of the read and write buffers in bytes. A LOOKUP of several thousand keys fits, so it is read with one
// system call.
const ioBuffer = 128 << 10

// service implements the gRPC services of engines and status.
type service struct {
	proto.UnimplementedEngineServiceServer
	proto.UnimplementedStatusServiceServer
	*Server
}

func (s service) Session(st grpc.BidiStreamingServer[proto.SessionRequest, proto.SessionResponse]) error {
	return s.serve(st)
}

// Events streams the entries that become resident and those that leave.
func (s service) Events(q *proto.EventsRequest, st grpc.ServerStreamingServer[proto.EventsResponse]) error {
	over, err := socket.Caller(st.Context()).Stream()
	if err != nil {
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	defer over()
	ctx, end := context.WithCancelCause(st.Context())
	defer end(nil)
	go func() {
		select {
		case <-s.quit:
			end(status.Error(codes.Unavailable, ErrClosing.Error()))
		case <-ctx.Done():
		}
	}()
	send := func(m *proto.EventsResponse) error { // releases the unit of s.aside, since the reader may be slow
		s.aside.Release(1)
		defer s.aside.Acquire(context.Background(), 1)
		return st.Send(m)
	}
	return (&eventStream{Store: s.store, Epoch: s.epoch, Send: send, Aside: s.aside}).Run(ctx, q)
}

// Serve listens on a Unix socket at path, and on the descriptor socket next to it, until the context is done or Close is
// called. It may be called once. Then it ends all sessions, waits for their jobs and removes the sockets.
func (s *Server) Serve(ctx context.Context, path string) error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return ErrClosing
	}
	s.served, s.path = make(chan struct{}), path
	s.mu.Unlock()
	defer close(s.served)

	socks, err := s.listen(path)
	if err != nil {
		return err
	}
	defer s.unlisten(socks)
	bounds := socket.Arriving{
		Budget: s.budgets.Arriving, Effort: s.effort, Closed: func(err error) { s.budgets.Closed(s.cfg.Log, err) },
	}
	g := grpc.NewServer(append(append(socket.Checks(s.rules), bounds.Options()...),
		grpc.MaxRecvMsgSize(s.cfg.Limits.MessageBytes), grpc.MaxSendMsgSize(s.cfg.Limits.MessageBytes),
		// The flow-control windows have fixed sizes. gRPC's estimator of window sizes costs round trips, and a local socket has
		// no delay to compensate.
		grpc.StaticStreamWindowSize(1<<20), grpc.StaticConnWindowSize(4<<20),
		grpc.ReadBufferSize(ioBuffer), grpc.WriteBufferSize(ioBuffer),
		grpc.WaitForHandlers(true),
	)...)
	proto.RegisterEngineServiceServer(g, service{Server: s})
	proto.RegisterStatusServiceServer(g, service{Server: s})
	if s.cfg.Admin != nil {
		proto.RegisterAdminServiceServer(g, s.cfg.Admin)
	}
	s.cfg.Log.Info("serving", "socket", path)
	close(s.ready)

	failed := make(chan error, 1)
	var accepting sync.WaitGroup
	accepting.Go(func() { failed <- g.Serve(socks.Sessions) })
	descriptors := &socket.Descriptors{Give: s.giveDescriptor, Log: s.cfg.Log, Open: s.budgets.Passing}
	accepting.Go(func() { descriptors.Serve(socks.Descriptors) })
	select {
	case <-ctx.Done():
	case <-s.quit:
	case err = <-failed:
	}
	socks.Descriptors.Close()
	s.endSessions()
	g.Stop()
	accepting.Wait()
	s.work.Wait()
	s.cfg.Log.Info("stopped serving", "socket", path)
	return err
}

func (s *Server) rules() socket.Rules { return s.current.Load().Rules }

// listen creates the sockets. From then on, Reload changes their users.
func (s *Server) listen(path string) (*socket.Pair, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	socks, err := socket.Listen(path, s.current.Load().Users, s.cfg.Log)
	if err == nil {
		s.sockets = socks
	}
	return socks, err
}

func (s *Server) unlisten(socks *socket.Pair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sockets = nil
	socks.Close()
}

// giveDescriptor passes a descriptor from the descriptor socket to the session that its nonce names.
func (s *Server) giveDescriptor(p socket.Peer, nonce [proto.NonceBytes]byte, tag uint64, f *os.File) error {
	s.mu.Lock()
	x := s.sessions[nonce]
	s.mu.Unlock()
	if x == nil || x.memory.uid != p.UID {
		return errors.New("the nonce names no session of this user")
	}
	if _, err := x.memory.checkFile(f); err != nil { // early check: REGISTER checks the file again
		return err
	}
	return x.memory.giveDescriptor(tag, f)
}

// Ready returns a channel that is closed when clients can connect.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Close ends Serve and waits until it has returned.
func (s *Server) Close() error {
	s.mu.Lock()
	s.shut()
	served := s.served
	s.mu.Unlock()
	if served != nil {
		<-served
	}
	return nil
}

// shut makes the server admit no further sessions. The server's mutex must be held.
func (s *Server) shut() {
	if s.closing {
		return
	}
	s.closing = true
	close(s.quit)
	if len(s.sessions) == 0 {
		close(s.empty)
	}
}

// endSessions ends all sessions, admits no further ones, and waits until all have released their resources.
func (s *Server) endSessions() {
	s.mu.Lock()
	s.shut()
	for _, x := range s.sessions {
		x.end(ErrClosing)
	}
	s.mu.Unlock()
	<-s.empty
}

// admit creates the session of a new stream.
func (s *Server) admit(st stream) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closing:
		return nil, status.Error(codes.Unavailable, ErrClosing.Error())
	case len(s.sessions) >= s.current.Load().Limits.Sessions:
		return nil, status.Errorf(codes.ResourceExhausted, "%d sessions, that is the limit", len(s.sessions))
	}
	x, err := s.newSession(st)
	if err != nil {
		return nil, status.Error(codes.ResourceExhausted, err.Error())
	}
	rand.Read(x.nonce[:]) // never fails
	s.sessions[x.nonce] = x
	return x, nil
}

// dismiss removes a session after its teardown.
func (s *Server) dismiss(x *session) {
	x.share.Leave()
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := x.engine; e != nil {
		if e.sessions--; e.sessions == 0 {
			delete(s.engines, e.key)
		}
	}
	delete(s.sessions, x.nonce)
	if s.closing && len(s.sessions) == 0 {
		close(s.empty)
	}
}

// begin counts a job. finish must follow at its completion, which may be after the end of its session.
func (s *Server) begin() {
	s.work.Add(1)
	s.jobs.Add(1)
}

func (s *Server) finish() {
	s.jobs.Add(-1)
	s.work.Done()
}
