package peers

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math"
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
	mostTakes    = 8       // offers that this host takes at once
	mostStreams  = 96      // concurrent calls on a connection
	leastLease   = time.Second
	longestLease = 10 * time.Minute
	buffers      = 64
	batch        = 4096 // changes in a message
	batchEvery   = 100 * time.Millisecond
	askRest      = 7 // rest after a lease request, in multiples of its duration, if the caller has other requests waiting
)

// lending is the part of this host that lends. It implements all of [proto.PeerServiceServer] but Offer.
type lending struct {
	proto.UnimplementedPeerServiceServer
	port
	grpc  *grpc.Server
	pace  pace
	asks  turns       // limits lease requests: those of one caller occupy at most half of the processors
	crowd crowd       // the same for all callers together that are not configured
	free  chan []byte // buffers for a part and a page; an element is nil until its first use
	shelf *shelf      // nil without NIXL

	mu     sync.Mutex
	leases map[uint64]*lent

	count struct{ bytes, nixl atomic.Uint64 }
}

// lent is a lease that a peer holds.
type lent struct {
	*store.Lease
	who  caller // caller that requested the lease
	keys int
	ends time.Time
}

func newLending(h *host) *lending {
	l := &lending{port: port{owner: h}, leases: map[uint64]*lent{}, free: make(chan []byte, buffers), pace: pace{rate: float64(h.cfg.Bandwidth)},
		asks: turns{most: runtime.GOMAXPROCS(0) / 2, rest: askRest}}
	l.crowd.Most = max(2, l.asks.most) // with two, a question that hangs delays no other caller
	l.crowd.rest = time.Duration(askRest * l.crowd.Most / max(1, l.asks.most))
	for range buffers {
		l.free <- nil // mapped on first use
	}
	l.tenants.of = map[string]uint32{}
	memory := max(h.cfg.Memory, leastMemory)
	l.memory = budget.OfPeers(memory)
	l.shares.of, l.shares.pins = map[caller]*holding{}, map[pin][]leaser{}
	l.shares.most = [resources]int{handshakes: mostKnocks, lines: int(memory / budget.PeersLine), leases: mostLent, leasedKeys: mostLentKeys,
		partBuffers: buffers, places: mostPlaced, takes: mostTakes}
	if h.nixl != nil {
		var err error
		if l.shelf, err = newShelf(pinner{h.nixl}); err != nil {
			h.cfg.Log.Warn("nothing is lent by NIXL", "error", err)
		}
	}
	most := min(mostBytes, arrivals.LargestMessage(l.memory.Alone()))
	l.grpc = grpc.NewServer(grpc.Creds(atDoor{h.id.serving(), &l.port}), grpc.MaxRecvMsgSize(most), grpc.MaxConcurrentStreams(mostStreams),
		grpc.ConnectionTimeout(handshakeTime), grpc.MaxHeaderListSize(mostHeader), grpc.StatsHandler(arrivals.Calls(arrivalsOf)),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}), grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second,
			Timeout: 5 * time.Second}), grpc.StaticStreamWindowSize(callWindow), grpc.StaticConnWindowSize(lineWindow),
		grpc.ReadBufferSize(lineBuffer), grpc.WriteBufferSize(lineBuffer), grpc.WaitForHandlers(true),
		grpc.ForceServerCodecV2(chargedCodec{encoding.GetCodecV2("proto")}),
		grpc.UnaryInterceptor(l.admit), grpc.StreamInterceptor(l.admitStream))
	return l
}

// serve serves calls until close, and ends leases at the end of their time.
func (l *lending) serve(at net.Listener) {
	var ending sync.WaitGroup
	ending.Go(l.endLeases)
	if err := l.grpc.Serve(door{at, &l.port}); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
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
func (l *lending) Residents(_ *proto.ResidentsRequest, st grpc.ServerStreamingServer[proto.ResidentsResponse]) (err error) {
	st0, ctx := l.owner.store, st.Context()
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
	told, metadata := l.turnover(), uint64(0)
	first := &proto.ResidentsResponse{Host: l.owner.self[:], Turnover: &told, Nixl: l.metadata(&metadata)}
	who := l.owner.callerOf(ctx)
	leave, err := l.asks.enterAmong(ctx, &l.crowd, who, batch)
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
		more, over := l.asks.enterAmong(ctx, &l.crowd, who, batch)
		if over != nil {
			leave, err = func() {}, cmp.Or(err, over)
			return false
		}
		leave = more
		return err == nil && l.owner.run.Err() == nil
	})
	leave()
	if first.Whole = true; err == nil {
		err = st.Send(first)
	}
	for err = cmp.Or(err, l.owner.id.admits(ctx)); err == nil; err = cmp.Or(err, l.owner.id.admits(ctx)) {
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
		if t := l.turnover(); t < told-told/8 || t > told+told/8 {
			m.Turnover, told = &t, t
		}
		if some || m.Turnover != nil {
			err = st.Send(m)
		}
		if some {
			wake = nil // wait for the whole batchEvery: further changes follow soon and go into the same message
		}
		if more := l.metadata(&metadata); more != nil && err == nil {
			err = st.Send(&proto.ResidentsResponse{Nixl: more})
		}
		pause := time.NewTimer(batchEvery)
		select {
		case <-wake:
		case <-pause.C:
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-l.owner.run.Done():
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
func (l *lending) Lease(ctx context.Context, q *proto.LeaseRequest) (*proto.LeaseResponse, error) {
	keys, err := proto.ParseKeys(nil, q.GetKeys(), kv.KeyBytes)
	digest := q.GetNamespaceDigest()
	if err != nil || len(digest) != len(kv.Digest{}) || len(keys) > mostKeys || q.GetRanks() == 0 {
		l.refused.Add(1)
		return nil, status.Error(codes.InvalidArgument, "keys, namespace or ranks")
	}
	who := l.owner.callerOf(ctx)
	leave, err := l.asks.enterAmong(ctx, &l.crowd, who, len(keys))
	if err != nil {
		return nil, err
	}
	defer leave()
	if l.pace.behind() > longestWait/2 || !l.takeLease(who, len(keys)) {
		l.refused.Add(1)
		return nil, status.Error(codes.ResourceExhausted, "it lends or sends as much as it may")
	}
	holds := false
	defer func() {
		if !holds {
			l.giveLease(who, len(keys))
		}
	}()
	found, err := l.owner.store.Lend(kv.Digest(digest), borrower{&l.shares, who}, store.LookupRequest{Group: q.GetGroup(), Keys: keys, Ranks: q.GetRanks(),
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
	r.Lease, r.Time = l.hold(found, who, len(keys), time), durationpb.New(time)
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
func (l *lending) Return(_ context.Context, q *proto.ReturnRequest) (*proto.ReturnResponse, error) {
	l.takeBack(q.GetLease())
	l.shelf.done(q.GetDone())
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
func (l *lending) metadata(told *uint64) []byte {
	if l.shelf == nil {
		return nil
	}
	agent := l.owner.nixl.agent
	now := agent.Generation() // read before the metadata, so that a change in between is sent twice instead of never
	if now == *told {
		return nil
	}
	m, err := agent.Metadata()
	if err != nil {
		l.owner.cfg.Log.Warn("peers are not told where to read by NIXL", "error", err)
	}
	*told = now
	return m
}

// open opens a piece of a lease and checks the range of bytes.
func (l *lending) open(lease uint64, index, rank uint32, from, bytes uint64) (piece *store.Piece, off, end int64, err error) {
	x := l.lease(lease)
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
func (l *lending) Fetch(q *proto.FetchRequest, st grpc.ServerStreamingServer[proto.FetchResponse]) error {
	who := l.owner.callerOf(st.Context())
	if err := l.await(st.Context(), who, partBuffers); err != nil {
		return status.FromContextError(err).Err()
	}
	defer l.back(who, partBuffers)
	buf, err := l.take(st.Context())
	if err != nil {
		return err
	}
	defer func() { l.free <- buf }()
	piece, off, end, err := l.open(q.GetLease(), q.GetIndex(), q.GetRank(), q.GetOffset(), q.GetBytes())
	if err != nil {
		return err
	}
	defer piece.Close()
	for off < end {
		from, n := pages(off, end, part)
		if err := readPages(piece, buf, from, n); err != nil {
			buf = l.given(buf, err)
			return status.Error(codes.DataLoss, err.Error())
		}
		if err := l.pace.waitOf(st.Context(), who, n); err != nil {
			return err
		}
		if err := st.Send(&proto.FetchResponse{Data: buf[off-from : n]}); err != nil {
			return err
		}
		l.count.bytes.Add(uint64(n - (off - from)))
		off = from + n
	}
	return nil
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

// admit runs a call, unless the certificate of its connection is no longer trusted, and charges its answer to the memory of the
// connection.
func (l *lending) admit(ctx context.Context, q any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if err := l.owner.id.admits(ctx); err != nil {
		return nil, err
	}
	r, err := handle(ctx, q)
	if err != nil {
		return nil, err
	}
	answer, err := l.charge(ctx, r)
	if r, ok := r.(*proto.LeaseResponse); ok && err != nil {
		l.takeBack(r.GetLease())
	}
	return answer, err
}

func (l *lending) admitStream(srv any, st grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := l.owner.id.admits(st.Context()); err != nil {
		return err
	}
	return handle(srv, sender{st, &l.port})
}

// leaseTime limits the requested time of a lease to the allowed range.
func leaseTime(wanted *durationpb.Duration) time.Duration {
	return min(max(wanted.AsDuration(), leastLease), longestLease)
}

// Renew implements [proto.PeerServiceServer].
func (l *lending) Renew(_ context.Context, q *proto.RenewRequest) (*proto.RenewResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	x, lasts := l.leases[q.GetLease()], leaseTime(q.GetTime())
	if x == nil {
		return nil, status.Error(codes.NotFound, "the lease is over")
	}
	x.ends = time.Now().Add(lasts)
	return &proto.RenewResponse{Time: durationpb.New(lasts)}, nil
}

// turnover returns the time in which this host replaces its content, in milliseconds, as announced to peers. It is 0 if this
// host takes no offers.
func (l *lending) turnover() uint64 {
	if l != nil {
		if t := l.owner.store.Turnover(); t > 0 {
			return uint64(t.Milliseconds()) + 1
		}
	}
	return 0
}

// turnoverOf converts the result of [lending.turnover] to a duration.
func turnoverOf(ms uint64) time.Duration {
	return time.Duration(min(ms, math.MaxInt64/uint64(time.Millisecond))) * time.Millisecond
}
