package peers

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

const (
	mostLent     = 8192    // number of leases
	mostLentKeys = 1 << 20 // keys of all leases together
	mostStreams  = 96      // concurrent calls on a connection
	leastLease   = time.Second
	longestLease = 10 * time.Minute
	part         = 512 << 10 // bytes in a message of Fetch
	buffers      = 64
	batch        = 4096 // changes in a message
	batchEvery   = 100 * time.Millisecond
	longestWait  = time.Second // longest wait of a fetch for its turn
	askRest      = 7           // rest after a lease request, in multiples of its duration, if the caller has other requests waiting
	askTime      = 200 * time.Microsecond
	keyTime      = 400 * time.Nanosecond // a request that takes longer than askTime and keyTime for each key has waited for a processor
	pageBytes    = 4096
)

// lending is the part of this host that lends.
type lending struct {
	owner *Peers
	grpc  *grpc.Server
	pace  pace
	asks  turns       // limits lease requests: those of one caller occupy at most half of the processors
	crowd crowd       // the same for all callers together that are not configured
	free  chan []byte // buffers for a part and a page; an element is nil until its first use
	shelf *shelf      // nil without NIXL

	shares shares
	memory *budget.Budget // memory of all connections
	room   staging.Signal // sent when a resource is returned

	mu      sync.Mutex
	leases  map[uint64]*lent
	tenants map[string]uint32 // numbers of memory accounts, by caller id

	count struct{ refused, bytes, nixl atomic.Uint64 }
}

// lent is a lease that a peer holds.
type lent struct {
	*store.Lease
	who  caller // caller that requested the lease
	keys int
	ends time.Time
}

func newLending(p *Peers) *lending {
	l := &lending{owner: p, leases: map[uint64]*lent{}, tenants: map[string]uint32{}, free: make(chan []byte, buffers),
		pace: pace{rate: float64(p.cfg.Bandwidth)}, asks: turns{most: runtime.GOMAXPROCS(0) / 2, rest: askRest}}
	l.crowd.Most = max(2, l.asks.most) // with two, a question that hangs delays no other caller
	l.crowd.rest = time.Duration(askRest * l.crowd.Most / max(1, l.asks.most))
	for range buffers {
		l.free <- nil // mapped on first use
	}
	memory := max(p.cfg.Memory, leastMemory)
	l.memory = budget.OfPeers(memory)
	l.shares.of, l.shares.pins = map[caller]*holding{}, map[pin][]leaser{}
	l.shares.most = [resources]int{handshakes: mostKnocks, lines: int(memory / budget.PeersLine), leases: mostLent, leasedKeys: mostLentKeys,
		partBuffers: buffers, places: mostPlaced, takes: mostTakes}
	if p.nixl != nil {
		var err error
		if l.shelf, err = newShelf(pinner{p.nixl}); err != nil {
			p.cfg.Log.Warn("nothing is lent by NIXL", "error", err)
		}
	}
	most := min(mostBytes, arrivals.LargestMessage(l.memory.Alone()))
	l.grpc = grpc.NewServer(grpc.Creds(atDoor{p.id.serving(), l}), grpc.MaxRecvMsgSize(most), grpc.MaxConcurrentStreams(mostStreams),
		grpc.ConnectionTimeout(handshakeTime), grpc.MaxHeaderListSize(mostHeader), grpc.StatsHandler(arrivals.Calls(arrivalsOf)),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}), grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second,
			Timeout: 5 * time.Second}), grpc.StaticStreamWindowSize(callWindow), grpc.StaticConnWindowSize(lineWindow),
		grpc.ReadBufferSize(lineBuffer), grpc.WriteBufferSize(lineBuffer), grpc.WaitForHandlers(true),
		grpc.ForceServerCodecV2(chargedCodec{encoding.GetCodecV2("proto")}),
		grpc.UnaryInterceptor(l.admit), grpc.StreamInterceptor(l.admitStream))
	proto.RegisterPeerServiceServer(l.grpc, service{lending: l})
	return l
}

// serve serves calls until close, and ends leases at the end of their time.
func (l *lending) serve(at net.Listener) {
	var ending sync.WaitGroup
	ending.Go(l.endLeases)
	if err := l.grpc.Serve(door{at, l}); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		l.owner.cfg.Log.Error("nothing is lent any more", "error", err)
	}
	ending.Wait()
	l.end(func(*lent) bool { return true })
}

func (l *lending) close() { l.grpc.Stop() }

func (l *lending) endLeases() {
	tick := time.NewTicker(tidyEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			l.shelf.end(now)
			l.end(func(x *lent) bool { return now.After(x.ends) })
		case <-l.owner.run.Done():
			return
		}
	}
}

// end releases the leases for which a function returns true.
func (l *lending) end(which func(*lent) bool) {
	var over []*lent
	l.mu.Lock()
	for n, x := range l.leases {
		if which(x) {
			over = append(over, x)
			l.forget(n, x)
		}
	}
	l.mu.Unlock()
	for _, x := range over {
		x.Release()
	}
}

func (l *lending) lease(n uint64) *lent {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.leases[n]
}

// Residents implements [proto.PeerServiceServer].
func (s service) Residents(_ *proto.ResidentsRequest, st grpc.ServerStreamingServer[proto.ResidentsResponse]) (err error) {
	st0, ctx := s.owner.store, st.Context()
	if holder := holderOf(ctx); holder != nil {
		if err := holder.Call(streamBytes); err != nil {
			return status.Error(codes.ResourceExhausted, "it has as many streams as it may")
		}
		defer holder.CallOver(streamBytes)
	}
	log := st0.Changes()
	if !st0.Lends() {
		log = entries.NewChangeLog(0)
	}
	after := log.Start()
	told, metadata := s.owner.turnover(), uint64(0)
	first := &proto.ResidentsResponse{Host: s.owner.self[:], Turnover: &told, Nixl: s.metadata(&metadata)}
	who := s.owner.callerOf(ctx)
	leave, err := s.asks.enterAmong(ctx, &s.crowd, who, batch)
	if err != nil {
		return err
	}
	st0.Lendable(func(list []entries.Change) bool {
		for i := range list {
			first.Added = appendPrint(first.Added, &list[i])
		}
		if len(first.Added) < 8*batch {
			return true
		}
		leave() // the caller may not read
		err = st.Send(first)
		first = &proto.ResidentsResponse{}
		more, over := s.asks.enterAmong(ctx, &s.crowd, who, batch)
		if over != nil {
			leave, err = func() {}, cmp.Or(err, over)
			return false
		}
		leave = more
		return err == nil && s.owner.run.Err() == nil
	})
	leave()
	if first.Whole = true; err == nil {
		err = st.Send(first)
	}
	for err = cmp.Or(err, s.owner.id.admits(ctx)); err == nil; err = cmp.Or(err, s.owner.id.admits(ctx)) {
		list := batches.Get().(*[]entries.Change)
		got, wake, lost := log.Read(after, (*list)[:0])
		if lost != nil {
			return status.Error(codes.Aborted, lost.Error())
		}
		m, some := changes(got), len(got) > 0
		if some {
			after = got[len(got)-1].Seq
		}
		batches.Put(list)
		if t := s.owner.turnover(); t < told-told/8 || t > told+told/8 {
			m.Turnover, told = &t, t
		}
		if some || m.Turnover != nil {
			err = st.Send(m)
		}
		if some {
			wake = nil // wait for the whole batchEvery: further changes follow soon and go into the same message
		}
		if more := s.metadata(&metadata); more != nil && err == nil {
			err = st.Send(&proto.ResidentsResponse{Nixl: more})
		}
		pause := time.NewTimer(batchEvery)
		select {
		case <-wake:
		case <-pause.C:
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-s.owner.run.Done():
			err = status.Error(codes.Unavailable, "the host ends")
		}
		pause.Stop()
	}
	return err
}

// batches is the pool of buffers for changes. A stream has one only while it reads, not while it waits.
var batches = sync.Pool{New: func() any { return new(make([]entries.Change, 0, batch)) }}

func appendPrint(b []byte, c *entries.Change) []byte {
	return binary.LittleEndian.AppendUint64(b, kv.Fingerprint(c.Namespace, c.Group, c.Key))
}

// changes returns the message for a list of changes. The receiver applies all removals before all additions, so only the last
// change of each entry goes into the message.
func changes(list []entries.Change) *proto.ResidentsResponse {
	m := &proto.ResidentsResponse{}
	last := make(map[uint64]entries.ChangeKind, len(list))
	for i := range list {
		last[kv.Fingerprint(list[i].Namespace, list[i].Group, list[i].Key)] = list[i].Kind
	}
	for print, kind := range last {
		if kind == entries.Stored {
			m.Added = binary.LittleEndian.AppendUint64(m.Added, print)
		} else {
			m.Removed = binary.LittleEndian.AppendUint64(m.Removed, print)
		}
	}
	return m
}

// Lease implements [proto.PeerServiceServer].
func (s service) Lease(ctx context.Context, q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
	keys, err := proto.ParseKeys(nil, q.GetKeys(), kv.KeyBytes)
	digest := q.GetNamespaceDigest()
	if err != nil || len(digest) != len(kv.Digest{}) || len(keys) > mostKeys || q.GetRanks() == 0 {
		s.count.refused.Add(1)
		return nil, status.Error(codes.InvalidArgument, "keys, namespace or ranks")
	}
	who := s.owner.callerOf(ctx)
	leave, err := s.asks.enterAmong(ctx, &s.crowd, who, len(keys))
	if err != nil {
		return nil, err
	}
	defer leave()
	if s.pace.behind() > longestWait/2 || !s.takeLease(who, len(keys)) {
		s.count.refused.Add(1)
		return nil, status.Error(codes.ResourceExhausted, "it lends or sends as much as it may")
	}
	holds := false
	defer func() {
		if !holds {
			s.giveLease(who, len(keys))
		}
	}()
	found, err := s.owner.store.Lend(kv.Digest(digest), borrower{&s.shares, who}, store.LookupRequest{Group: q.GetGroup(), Keys: keys, Ranks: q.GetRanks(),
		Leading: q.GetLeading()})
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	r := &proto.LeaseResponse{Busy: found.Short()}
	for i := 0; i < len(keys) && ctx.Err() == nil; i++ {
		if !found.Has(i) {
			continue
		}
		e := &proto.LentEntry{Index: uint32(i)}
		for rank := range entries.Ranks(q.GetRanks()) {
			if n, err := found.Size(i, rank); err == nil {
				e.Bytes = append(e.Bytes, uint64(n))
			}
		}
		if len(e.Bytes) == bits.OnesCount64(q.GetRanks()) {
			r.Entries = append(r.Entries, e)
		} else if q.GetLeading() {
			break
		}
	}
	if err := ctx.Err(); err != nil { // the caller is gone and would never return the lease
		found.Release()
		return nil, status.FromContextError(err).Err()
	}
	if len(r.Entries) == 0 {
		found.Release()
		return r, nil
	}
	time := leaseTime(q.GetTime())
	r.Lease, r.Time = s.hold(found, who, len(keys), time), durationpb.New(time)
	holds = true
	return r, nil
}

// hold stores a lease under a random number, so that no other peer can guess it and no number of an earlier run is valid.
func (l *lending) hold(found *store.Lease, who caller, keys int, d time.Duration) (n uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for n == 0 || l.leases[n] != nil {
		n = rand.Uint64()
	}
	l.leases[n] = &lent{found, who, keys, time.Now().Add(d)}
	return n
}

// takeLease charges a caller for a lease of the given number of keys.
func (l *lending) takeLease(who caller, keys int) bool {
	if !l.shares.take(who, leases, 1) {
		return false
	}
	if l.shares.take(who, leasedKeys, keys) {
		return true
	}
	l.shares.give(who, leases, 1)
	return false
}

func (l *lending) giveLease(who caller, keys int) {
	l.shares.give(who, leases, 1)
	l.shares.give(who, leasedKeys, keys)
}

// forget removes a lease and ends its charge. A lease for an offer has no keys and is not charged. The lock must be held.
func (l *lending) forget(n uint64, x *lent) {
	delete(l.leases, n)
	if x.keys > 0 {
		l.giveLease(x.who, x.keys)
	}
}

// Return implements [proto.PeerServiceServer].
func (s service) Return(_ context.Context, q *proto.ReturnRequest) (*proto.ReturnResponse, error) {
	s.takeBack(q.GetLease())
	s.shelf.done(q.GetDone())
	return &proto.ReturnResponse{}, nil
}

// takeBack ends a lease.
func (l *lending) takeBack(n uint64) {
	l.mu.Lock()
	x := l.leases[n]
	if x != nil {
		l.forget(n, x)
	}
	l.mu.Unlock()
	if x != nil {
		x.Release()
	}
}

// metadata returns the metadata of the NIXL agent if it has changed since the generation told, which it updates. Otherwise it
// returns nil.
func (s service) metadata(told *uint64) []byte {
	if s.shelf == nil {
		return nil
	}
	agent := s.owner.nixl.agent
	now := agent.Generation() // read before the metadata, so that a change in between is sent twice instead of never
	if now == *told {
		return nil
	}
	m, err := agent.Metadata()
	if err != nil {
		s.owner.cfg.Log.Warn("peers are not told where to read by NIXL", "error", err)
	}
	*told = now
	return m
}

// open opens a piece of a lease and checks the range of bytes.
func (s service) open(lease uint64, index, rank uint32, from, bytes uint64) (piece *store.Piece, off, end int64, err error) {
	x := s.lease(lease)
	if x == nil {
		return nil, 0, 0, status.Error(codes.NotFound, "the lease is over")
	}
	if piece, err = x.Open(int(index), rank); err != nil {
		return nil, 0, 0, status.Error(codes.NotFound, err.Error())
	}
	if off, end = int64(from), int64(from+bytes); off < 0 || end < off || end > piece.Size() {
		err = status.Errorf(codes.OutOfRange, "bytes %d to %d of %d", off, end, piece.Size())
		piece.Close()
		return nil, 0, 0, err
	}
	return piece, off, end, nil
}

// Fetch implements [proto.PeerServiceServer].
func (s service) Fetch(q *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
	who := s.owner.callerOf(st.Context())
	if err := s.await(st.Context(), who, partBuffers); err != nil {
		return status.FromContextError(err).Err()
	}
	defer s.back(who, partBuffers)
	buf, err := s.take(st.Context())
	if err != nil {
		return err
	}
	defer func() { s.free <- buf }()
	piece, off, end, err := s.open(q.GetLease(), q.GetIndex(), q.GetRank(), q.GetOffset(), q.GetBytes())
	if err != nil {
		return err
	}
	defer piece.Close()
	for off < end {
		from, n := pages(off, end, part)
		if err := readPages(piece, buf, from, n); err != nil {
			buf = s.given(buf, err)
			return status.Error(codes.DataLoss, err.Error())
		}
		if err := s.pace.waitOf(st.Context(), who, n); err != nil {
			return err
		}
		if err := st.Send(&proto.FetchResponse{Data: buf[off-from : n]}); err != nil {
			return err
		}
		s.count.bytes.Add(uint64(n - (off - from)))
		off = from + n
	}
	return nil
}

// await waits until a caller may take one of a resource. The counterpart is [lending.back].
func (l *lending) await(ctx context.Context, who caller, r resource) error {
	for room := l.room.Next(); !l.shares.take(who, r, 1); room = l.room.Next() {
		select {
		case <-room:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (l *lending) back(who caller, r resource) {
	l.shares.give(who, r, 1)
	l.room.Send()
}

// pages extends the start of [off, end) to a page boundary and limits the range to most bytes. It returns the start and the
// length. Files opened with O_DIRECT can only be read in pages.
func pages(off, end, most int64) (from, n int64) {
	from = off &^ (pageBytes - 1)
	return from, min(end-from, most)
}

// readPages reads n bytes of a piece from a page boundary, and the rest of the last page.
func readPages(piece *store.Piece, dst []byte, from, n int64) error {
	_, err := piece.File().ReadAt(dst[:min((n+pageBytes-1)&^(pageBytes-1), piece.Size()-from)], from)
	return err
}

// take takes a buffer. The number of buffers bounds the bytes that all calls together have read and not yet sent.
func (l *lending) take(ctx context.Context) ([]byte, error) {
	select {
	case b := <-l.free:
		if b != nil {
			return b, nil
		}
		m, err := staging.Map(part + pageBytes)
		if err != nil {
			l.free <- nil
			return nil, status.Error(codes.ResourceExhausted, err.Error())
		}
		return m.Bytes(), nil
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// given returns the buffer of a failed read. If the read may still write to it, given waits for the end of the read. It returns
// nil if this host closes first.
func (l *lending) given(buf []byte, failed error) []byte {
	var held staging.Held
	if errors.As(failed, &held) {
		select {
		case <-held.Ended():
		case <-l.owner.run.Done():
			return nil
		}
	}
	return buf
}

// pace limits bytes a second. A rate of 0 means no limit.
type pace struct {
	rate float64 // bytes a second

	mu   sync.Mutex
	free time.Time // time at which all admitted bytes will have been sent

	turns turns
}

// turns limits the concurrent calls of each caller. The zero value allows one.
type turns struct {
	most int
	rest time.Duration // rest after a call, as a multiple of its duration, if other calls of the caller wait

	mu sync.Mutex
	of map[caller]*turn
}

// turn holds the calls of one caller.
type turn struct {
	calls int
	taken chan struct{}
}

// enter waits until few enough calls of the caller are running. The call counts as running until leave is called.
func (t *turns) enter(ctx context.Context, who caller) (leave func(), err error) {
	t.mu.Lock()
	if t.of == nil {
		t.of = map[caller]*turn{}
	}
	x := t.of[who]
	if x == nil {
		x = &turn{taken: make(chan struct{}, max(1, t.most))}
		t.of[who] = x
	}
	x.calls++
	t.mu.Unlock()
	over := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if x.calls--; x.calls == 0 {
			delete(t.of, who)
		}
	}
	select {
	case x.taken <- struct{}{}:
		since := time.Now()
		return func() {
			t.mu.Lock()
			waits := x.calls > len(x.taken)
			t.mu.Unlock()
			end := func() { <-x.taken; over() }
			if rest := t.rest * time.Since(since); waits && rest > 0 {
				time.AfterFunc(rest, end)
			} else {
				end()
			}
		}, nil
	case <-ctx.Done():
		over()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// crowd limits the concurrent calls of all callers that are not configured, of which there may be any number.
type crowd struct {
	arrivals.Queue
	rest time.Duration // as of turns
}

// enter waits until few enough calls of the crowd are running, and until no call waits of a caller that had less. What the call takes
// longer than its keys need is no reason for others of the crowd to wait: other processes had the processors.
func (c *crowd) enter(ctx context.Context, who caller, keys int) (leave func(), err error) {
	if err := c.Enter(ctx, who.id); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	since := time.Now()
	return func() {
		took := min(time.Since(since), askTime+time.Duration(keys)*keyTime)
		end := func() { c.Leave(who.id, took) }
		if rest := c.rest * took; rest > 0 && c.Waits() {
			time.AfterFunc(rest, end)
		} else {
			end()
		}
	}, nil
}

// enterAmong enters the turns of the caller, and those of the crowd if the caller is not configured.
func (t *turns) enterAmong(ctx context.Context, strangers *crowd, who caller, keys int) (leave func(), err error) {
	own, err := t.enter(ctx, who)
	if err != nil || who.known {
		return own, err
	}
	all, err := strangers.enter(ctx, who, keys)
	if err != nil {
		own()
		return nil, err
	}
	return func() { all(); own() }, nil
}

// waitOf waits for the caller's turn and then like wait.
func (p *pace) waitOf(ctx context.Context, who caller, bytes int64) error {
	if p.rate == 0 {
		return nil
	}
	soon, stop := context.WithTimeout(ctx, longestWait)
	defer stop()
	leave, err := p.turns.enter(soon, who)
	if err != nil {
		return status.Error(codes.ResourceExhausted, "its calls take as much as they may")
	}
	defer leave()
	return p.wait(ctx, bytes, longestWait)
}

// behind returns the time that a new byte would wait.
func (p *pace) behind() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(0, time.Until(p.free))
}

// wait reserves bytes and waits until they may be sent. It fails if that would take longer than most.
func (p *pace) wait(ctx context.Context, bytes int64, most time.Duration) error {
	if p.rate == 0 {
		return nil
	}
	now := time.Now()
	p.mu.Lock()
	if p.free.Before(now) {
		p.free = now
	}
	wait := p.free.Sub(now)
	if wait > most {
		p.mu.Unlock()
		return status.Error(codes.ResourceExhausted, "as much is moved as may be")
	}
	p.free = p.free.Add(time.Duration(float64(bytes) / p.rate * float64(time.Second)))
	p.mu.Unlock()
	if wait < time.Millisecond {
		return nil
	}
	turn := time.NewTimer(wait)
	defer turn.Stop()
	select {
	case <-turn.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}
