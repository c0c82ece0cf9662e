package peers

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/gds/nixl"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/staging"
)

const (
	mostReads    = 16 // under way at a time: each has its destination until it ends
	mostOfOne    = 8  // of them from one peer, so that one which stops leaves some to others
	placeWait    = stall / 4
	mostWorkers  = 4
	mostMetadata = 1 << 20                // bytes of what a peer says of its agent: some hundred for each registration
	nixlPause    = 5 * time.Minute        // at most, after a READ that failed: UCX may have no way to that peer
	polls        = 4                      // of a READ in a row, before each waits
	pollEvery    = 100 * time.Microsecond // then, and
	lookEvery    = 50 * time.Millisecond  // once it was given up
	// afterError is how long the destination of a READ that failed is kept. UCX reports the failure of a connection once its requests are
	// over, and NIXL that of one request of a READ without a look at the others.
	afterError = time.Second
)

// What is read to prove that a peer's memory can be, and how fast.
const (
	triedBytes = 1 << 20
	triedReads = 8
	triedIn    = 5 * time.Second
)

// nixlWay reads bytes from the memory of peers, and lets them read from this host's.
type nixlWay struct {
	lib   *nixl.Library
	agent *nixl.Agent
	log   *slog.Logger

	places chan struct{} // one for each READ that has not ended
	stuck  atomic.Int64  // READs that were given up, and have not ended
	held   sync.WaitGroup
	over   chan struct{} // closed with the agent
	proof  *staging.Mapping

	mu      sync.Mutex
	remotes map[string]*remote
	closed  bool
}

// remote is the agent of a peer.
type remote struct {
	name     string
	metadata []byte
	wanted   bool // the peer is there
	proven   bool // its memory was read; what it was is not known any more after a READ has failed
	proving  bool // that is being found out
	places   chan struct{}
	reads    int       // that have not ended
	stuck    int       // of them, given up: a peer that has one is read by gRPC
	until    time.Time // before that it is not proven again
	pause    time.Duration
}

func newWay(path string, self [16]byte, log *slog.Logger) (_ *nixlWay, err error) {
	w := &nixlWay{log: log, places: make(chan struct{}, mostReads), over: make(chan struct{}), remotes: map[string]*remote{}}
	if w.lib, err = nixl.Open(path); err != nil {
		return nil, err
	}
	if w.agent, err = w.lib.Agent(hex.EncodeToString(self[:]), min(mostWorkers, runtime.GOMAXPROCS(0))); err != nil {
		return nil, err
	}
	if w.proof, err = staging.Map(triedBytes); err == nil {
		err = w.agent.Register(w.proof.Bytes())
	}
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

// close ends all READs.
func (w *nixlWay) close() error {
	if w == nil {
		return nil
	}
	err := w.agent.Close()
	w.mu.Lock()
	w.closed = true
	close(w.over)
	w.mu.Unlock()
	w.held.Wait()
	if w.proof != nil {
		err = errors.Join(err, w.proof.Unmap())
	}
	return err
}

// learn takes in what a peer says of its agent, all of it each time.
func (w *nixlWay) learn(name string, metadata []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.remotes[name]
	if r == nil {
		r = &remote{name: name, places: make(chan struct{}, mostOfOne)}
		w.remotes[name] = r
	}
	r.metadata, r.wanted, r.until = metadata, true, time.Time{}
	r.pause = 0
	if r.proven {
		w.loadMore(r)
	}
}

func (w *nixlWay) loadMore(r *remote) {
	if err := w.agent.Load(r.name, r.metadata); err != nil {
		w.log.Warn("new memory of a peer is not read by NIXL", "agent", r.name, "error", err)
	}
}

// drop follows the end of a peer.
func (w *nixlWay) drop(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.remotes[name]; r != nil {
		r.wanted = false
		w.forget(r)
	}
}

// forget has the agent forget a peer that is not there, when its last READ has ended. The lock is held.
func (w *nixlWay) forget(r *remote) {
	if !r.wanted && r.reads == 0 && !r.proving {
		delete(w.remotes, r.name)
		_ = w.agent.Forget(r.name) // NIXL may have forgotten it by itself
	}
}

// prove finds out, in the background, whether a peer can be read, if that is not known and time to.
func (w *nixlWay) prove(x *peer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.remotes[x.agent()]
	if r == nil || r.proven || r.proving || r.reads > 0 || time.Now().Before(r.until) {
		return
	}
	if client, err := x.client(false); err == nil {
		r.proving = true
		metadata := r.metadata
		x.owner.work.Go(func() { w.proveBy(x.run, client, r, metadata) })
	}
}

func (w *nixlWay) proveBy(ctx context.Context, client proto.PeerServiceClient, r *remote, metadata []byte) {
	_ = w.agent.Forget(r.name) // the connection may be broken
	speed, err := w.measure(ctx, client, r, metadata)
	w.mu.Lock()
	defer w.mu.Unlock()
	r.proving = false
	switch {
	case err == nil:
		r.proven = true
		if !slices.Equal(metadata, r.metadata) { // there is more by now
			w.loadMore(r)
		}
		w.log.Info("a peer is read by NIXL", "agent", r.name, "bytes_per_second", int64(speed))
	case ctx.Err() == nil:
		w.doubtful(r, err)
	}
	w.forget(r)
}

// measure reads a slot of a peer, several times. The best speed is what the way can do.
func (w *nixlWay) measure(ctx context.Context, client proto.PeerServiceClient, r *remote, metadata []byte) (best float64, err error) {
	ctx, stop := context.WithTimeout(ctx, triedIn)
	defer stop()
	if err := w.agent.Load(r.name, metadata); err != nil {
		return 0, err
	}
	m, err := client.Place(ctx, &proto.PlaceRequest{Bytes: triedBytes})
	if err != nil {
		return 0, errors.New(status.Convert(err).Message())
	}
	defer func() { _, _ = client.Return(ctx, &proto.ReturnRequest{Done: []uint64{m.GetSlot()}}) }() // it ends by itself
	parts, n, err := partsOf(m, triedBytes)
	if err != nil {
		return 0, err
	}
	for range triedReads {
		since := time.Now()
		read, err := w.agent.Read(w.proof.Bytes()[:n], r.name, parts)
		if err != nil {
			return 0, err
		}
		if err := await(ctx, read); err != nil {
			w.mu.Lock()
			r.reads++ // it may go on to write: no one has use for the bytes, but it is known until it ends
			w.mu.Unlock()
			w.settleLater(func() {
				w.settle(read)
				w.leave(r)
			})
			return 0, fmt.Errorf("%w: %w", errNoWay, err)
		}
		best = max(best, float64(n)/time.Since(since).Seconds())
	}
	return best, nil
}

// begin takes a place for a READ from a peer. It is nil where the peer is to be read by gRPC; has says whether it has NIXL at all.
func (w *nixlWay) begin(ctx context.Context, name string) (r *remote, has bool) {
	w.mu.Lock()
	r = w.remotes[name]
	if r == nil || !r.proven || r.stuck > 0 || w.stuck.Load() >= mostReads {
		w.mu.Unlock()
		return nil, r != nil
	}
	r.reads++
	w.mu.Unlock()
	if take(ctx, r.places) {
		if take(ctx, w.places) {
			return r, true
		}
		<-r.places
	}
	w.leave(r)
	return nil, true
}

// take takes a place, if there is one soon enough for the bytes to come by gRPC otherwise.
func take(ctx context.Context, places chan struct{}) bool {
	select {
	case places <- struct{}{}:
		return true
	default:
	}
	late := time.NewTimer(placeWait)
	defer late.Stop()
	select {
	case places <- struct{}{}:
		return true
	case <-late.C:
	case <-ctx.Done():
	}
	return false
}

// end gives the places back.
func (w *nixlWay) end(r *remote) {
	<-w.places
	<-r.places
	w.leave(r)
}

func (w *nixlWay) leave(r *remote) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r.reads--
	w.forget(r)
}

// doubt has a peer read by gRPC until its memory has been read again.
func (w *nixlWay) doubt(r *remote, cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.proven {
		w.doubtful(r, cause)
	}
}

func (w *nixlWay) isProven(name string) bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.remotes[name]
	return r != nil && r.proven
}

func (w *nixlWay) doubtful(r *remote, cause error) {
	r.pause = min(max(firstPause, 2*r.pause), nixlPause)
	r.proven, r.until = false, time.Now().Add(r.pause)
	w.log.Warn("a peer is read by gRPC instead of NIXL", "agent", r.name, "for", r.pause, "error", cause)
}

// heldError is the error of a READ that may still write to its destination. It is a [staging.Held].
type heldError struct {
	error
	ended chan struct{}
}

func (e *heldError) Unwrap() error          { return e.error }
func (e *heldError) Ended() <-chan struct{} { return e.ended }

// hold keeps a READ that was given up, or has failed, with its place, until nothing can come of it any more.
func (w *nixlWay) hold(r *remote, read *nixl.Read, cause error) error {
	w.stuck.Add(1)
	w.mu.Lock()
	r.stuck++
	w.mu.Unlock()
	e := &heldError{cause, make(chan struct{})}
	w.settleLater(func() {
		w.settle(read)
		close(e.ended)
		w.mu.Lock()
		r.stuck--
		w.mu.Unlock()
		w.stuck.Add(-1)
		w.end(r)
	})
	return e
}

// settleLater runs what settles a READ until the agent is closed, or at once if it is.
func (w *nixlWay) settleLater(run func()) {
	w.mu.Lock()
	closed := w.closed
	if !closed {
		w.held.Go(run)
	}
	w.mu.Unlock()
	if closed {
		run()
	}
}

// settle waits until nothing can come of a READ any more.
func (w *nixlWay) settle(read *nixl.Read) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		done, err := read.Done()
		if done && err == nil {
			return
		}
		wait := look.C
		if done {
			wait = time.After(afterError)
		}
		select {
		case <-wait:
		case <-w.over:
			return
		}
		if done {
			return
		}
	}
}

// spot is where a peer has a piece in its memory.
type spot struct {
	parts []nixl.Part
	left  atomic.Int64 // bytes that may be read before it is asked again
}

// from are the parts of n bytes from an offset.
func from(parts []nixl.Part, off, n int64) (list []nixl.Part) {
	for _, p := range parts {
		if skip := min(off, p.Bytes); skip < p.Bytes && n > 0 {
			take := min(n, p.Bytes-skip)
			list = append(list, nixl.Part{Address: p.Address + uint64(skip), Bytes: take})
			n, off = n-take, 0
		} else {
			off -= skip
		}
	}
	return list
}

// readByNIXL reads bytes of a piece, unless it says that nothing was done: then they are to be fetched.
func (p *piece) readByNIXL(ctx context.Context, dst []byte, off int64, heard func()) (did bool, err error) {
	x := p.loan.peer
	w := x.owner.nixl
	if w == nil || !w.agent.Has(dst) || x.left(p.loan) < x.owner.cfg.Budget {
		return false, nil
	}
	r, has := w.begin(ctx, x.agent())
	if r == nil {
		if has {
			x.count.fallbacks.Add(1)
		}
		return false, nil
	}
	kept := false // by hold
	defer func() {
		if !kept {
			w.end(r)
		}
		if !did {
			x.count.fallbacks.Add(1)
		}
	}()
	for all := int64(len(dst)); len(dst) > 0; {
		parts, slot, err := p.place(ctx, off, int64(len(dst)))
		if err != nil {
			if code := status.Code(err); code != codes.ResourceExhausted && code != codes.NotFound && ctx.Err() == nil {
				w.doubt(r, err)
			}
			return ctx.Err() != nil, err
		}
		heard()
		n := int64(0)
		for i := range parts {
			n += parts[i].Bytes
		}
		read, err := w.agent.Read(dst[:n], r.name, parts)
		if err != nil { // it does not have that memory, or the connection is gone; nothing was begun
			w.doubt(r, err)
			return false, err
		}
		if err := await(ctx, read); err != nil {
			if x.run.Err() == nil {
				w.doubt(r, err)
			}
			kept = true
			return true, w.hold(r, read, err)
		}
		heard()
		if slot != 0 {
			x.spend(slot)
		}
		if dst, off = dst[n:], off+n; len(dst) == 0 {
			x.count.nixl.Add(uint64(all))
		}
	}
	return true, nil
}

// await asks for the end of a READ. Where the processor copies, it is the asking that does.
func await(ctx context.Context, read *nixl.Read) error {
	for n := 0; ; n++ {
		if done, err := read.Done(); done {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if n < polls {
			runtime.Gosched()
		} else {
			time.Sleep(pollEvery)
		}
	}
}

// place is where the peer has bytes of the piece. In a slot these may be the first of what is asked for.
func (p *piece) place(ctx context.Context, off, n int64) (parts []nixl.Part, slot uint64, err error) {
	if at := p.placed.Load(); at != nil && at.left.Add(-n) >= 0 {
		return from(at.parts, off, n), 0, nil
	}
	x := p.loan.peer
	client, err := x.client(true)
	if err != nil {
		return nil, 0, err
	}
	m, err := client.Place(ctx, &proto.PlaceRequest{Lease: p.loan.lease, Index: p.entry, Rank: p.rank, Offset: uint64(off), Bytes: uint64(n),
		Done: x.spent()})
	if err != nil {
		return nil, 0, err
	}
	most := n
	if m.GetSlot() == 0 {
		most = p.bytes
	}
	parts, sum, err := partsOf(m, most)
	switch {
	case err != nil:
		return nil, 0, err
	case m.GetSlot() != 0:
		return parts, m.GetSlot(), nil
	case sum != p.bytes:
		return nil, 0, fmt.Errorf("%w: a place of %d bytes for a piece of %d", ErrMessage, sum, p.bytes)
	}
	at := &spot{parts: parts}
	at.left.Store(p.bytes - n)
	p.placed.Store(at)
	return from(parts, off, n), 0, nil
}

// partsOf are the parts of an answer, which together have at most so many bytes.
func partsOf(m *proto.PlaceResponse, most int64) (parts []nixl.Part, sum int64, err error) {
	for _, p := range m.GetParts() {
		if p.GetBytes() == 0 || p.GetBytes() > uint64(most-sum) {
			return nil, 0, fmt.Errorf("%w: a place of %d bytes", ErrMessage, p.GetBytes())
		}
		parts, sum = append(parts, nixl.Part{Address: p.GetAddress(), Bytes: int64(p.GetBytes())}), sum+int64(p.GetBytes())
	}
	if sum == 0 {
		return nil, 0, fmt.Errorf("%w: a place of nothing", ErrMessage)
	}
	return parts, sum, nil
}

// agent is the name of the peer's, empty where it has none.
func (x *peer) agent() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.host == [16]byte{} {
		return ""
	}
	return hex.EncodeToString(x.host[:])
}

// spend notes a slot of the peer that is not needed any more.
func (x *peer) spend(slot uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.slots = append(x.slots, slot)
}

// spent takes what was noted, to tell the peer.
func (x *peer) spent() (list []uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	list, x.slots = x.slots, nil
	return list
}

// pinner registers memory with the agent. Memory that cannot be registered is read by gRPC.
type pinner struct{ *nixlWay }

func (p pinner) Register(mem []byte) error {
	if err := p.agent.Register(mem); err != nil && !errors.Is(err, nixl.ErrClosed) {
		p.log.Warn("peers do not read this memory by NIXL", "bytes", len(mem), "error", err)
	}
	return nil
}

func (p pinner) Unregister(mem []byte) error {
	if !p.agent.Has(mem) {
		return nil
	}
	return p.agent.Unregister(mem)
}

// Pinners register memory in which this host has pieces, or reads them to: with NIXL, if there is one. They refuse nothing.
func (p *Peers) Pinners() []staging.Pinner {
	if p == nil || p.nixl == nil {
		return nil
	}
	return []staging.Pinner{pinner{p.nixl}}
}
