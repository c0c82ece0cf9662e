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

	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/gds/nixl"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/staging"
)

const (
	mostReads    = 16 // READs under way at a time; each occupies its destination until it ends
	mostOfOne    = 8  // READs under way from one peer, so that a peer that stops leaves some to others
	placeWait    = stall / 4
	mostWorkers  = 4
	mostMetadata = 1 << 20                // bytes of an agent's metadata; a registration takes a few hundred
	nixlPause    = 5 * time.Minute        // longest pause after a failed READ: UCX may have no transport to that peer
	polls        = 4                      // times that a READ is polled without a sleep
	pollEvery    = 100 * time.Microsecond // interval of the following polls
	lookEvery    = 50 * time.Millisecond  // interval of polls after the READ was abandoned
	// afterError is the time for which the destination of a failed READ is kept. NIXL reports the failure of the first request
	// of a READ, while other requests may still be under way. UCX reports the failure of a connection only after its requests
	// have ended.
	afterError = time.Second
)

// Limits of the test read that proves that a peer's memory can be read, and measures the speed.
const (
	triedBytes = 1 << 20
	triedReads = 8
	triedIn    = 5 * time.Second
)

// nixlWay reads from the memory of peers by NIXL, and registers this host's memory for their reads.
type nixlWay struct {
	lib   *nixl.Library
	agent *nixl.Agent
	log   *slog.Logger

	places chan struct{} // one element for each READ that has not ended
	stuck  atomic.Int64  // READs that were abandoned and have not ended
	held   sync.WaitGroup
	over   chan struct{} // closed with the agent
	proof  *staging.Mapping

	mu      sync.Mutex
	remotes map[string]*remote
	closed  bool
}

// remote is the NIXL agent of a peer.
type remote struct {
	name     string
	metadata []byte
	wanted   bool // the peer is connected
	proven   bool // a test read succeeded, and no READ has failed since
	proving  bool // a test read is under way
	places   chan struct{}
	reads    int       // READs that have not ended
	stuck    int       // the part of reads that was abandoned; while there is one, the peer is read by gRPC
	until    time.Time // time before which no new test read is made
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

// close closes the agent, which ends all READs, and unmaps the test buffer.
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

// learn stores the metadata of a peer's agent. A message always carries the whole metadata.
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

// drop notes that a peer has disconnected.
func (w *nixlWay) drop(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.remotes[name]; r != nil {
		r.wanted = false
		w.forget(r)
	}
}

// forget removes a disconnected peer from the agent after its last READ has ended. The lock must be held.
func (w *nixlWay) forget(r *remote) {
	if !r.wanted && r.reads == 0 && !r.proving {
		delete(w.remotes, r.name)
		_ = w.agent.Forget(r.name) // NIXL may have removed it already
	}
}

// prove starts a test read in the background, unless the result is known, a test is under way, or it is too early for another.
func (w *nixlWay) prove(ctx context.Context, work *sync.WaitGroup, name string, client proto.PeerServiceClient) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.remotes[name]
	if r == nil || r.proven || r.proving || r.reads > 0 || time.Now().Before(r.until) {
		return
	}
	r.proving = true
	metadata := r.metadata
	work.Go(func() { w.proveBy(ctx, client, r, metadata) })
}

func (w *nixlWay) proveBy(ctx context.Context, client proto.PeerServiceClient, r *remote, metadata []byte) {
	_ = w.agent.Forget(r.name) // a connection that is left from before may be broken
	speed, err := w.measure(ctx, client, r, metadata)
	w.mu.Lock()
	defer w.mu.Unlock()
	r.proving = false
	switch {
	case err == nil:
		r.proven = true
		if !slices.Equal(metadata, r.metadata) { // new metadata has arrived during the test
			w.loadMore(r)
		}
		w.log.Info("a peer is read by NIXL", "agent", r.name, "bytes_per_second", int64(speed))
	case ctx.Err() == nil:
		w.doubtful(r, err)
	}
	w.forget(r)
}

// measure reads a slot of a peer several times and returns the best speed in bytes a second.
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
	defer func() { _, _ = client.Return(ctx, &proto.ReturnRequest{Done: []uint64{m.GetSlot()}}) }() // the slot ends by itself if this call fails
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
			r.reads++ // the READ may still write to the test buffer, where it does no harm; the peer is kept until it ends
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

// begin reserves a place for a READ from a peer. It returns nil if the peer is to be read by gRPC; has reports whether the peer
// has NIXL at all.
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

// take takes a place. It waits for at most placeWait, so that there is enough time left to fetch the bytes by gRPC.
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

// end returns the places of a READ.
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

// doubt has a peer read by gRPC until the next successful test read.
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

// heldError is the error of a READ that may still write to its destination. It implements [staging.Held].
type heldError struct {
	error
	ended chan struct{}
}

func (e *heldError) Unwrap() error          { return e.error }
func (e *heldError) Ended() <-chan struct{} { return e.ended }

// hold keeps an abandoned or failed READ, and its places, until the READ can no longer write.
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

// settleLater runs a function in the background, which close waits for. If the agent is closed, it runs the function at once.
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

// settle waits until a READ can no longer write to its destination.
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

// spot is the address of a piece in a peer's memory.
type spot struct {
	parts []nixl.Part
	left  atomic.Int64 // bytes that may be read before the peer is asked again, so that it can count and limit them
}

// from returns the parts for n bytes from an offset.
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

// await polls a READ until it ends. On transports where the processor copies the bytes, the polling does the copying.
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

// partsOf returns the parts of an answer and their sum. It refuses more than most bytes.
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

// pinner registers memory with the agent. A failure is only logged: peers read that memory by gRPC.
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
