package moves

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Origin is the root from which entries are copied.
type Origin struct {
	*entries.Set
	Level  int
	Copies *entries.Copies
	Clock  func() uint64 // returns the time for events
	// Open opens a piece of a pinned entry.
	Open func(m *entries.Move, rank uint32) (Piece, error)
}

// Piece is a [Source] that must be closed. Bad reports that its bytes are wrong.
type Piece interface {
	Source
	Bad(cause error)
	Close()
}

// Level is the destination of moves.
type Level interface {
	Number() int
	Count() *Counters
	// Holds reports whether the level has a complete copy of an entry.
	Holds(fp uint64) bool
	// Facts completes a candidate: whether any level has its parent, whether any has a child of it, and the number of other
	// hosts with a copy.
	Facts(c *abi.Candidate)
	// Admits asks the level's admit policy. asked is false if there is none.
	Admits(c *abi.Candidate, ns *catalog.Namespace) (admitted, asked bool)
	// Begin creates the target of a piece with this header. The error is [entries.ErrResident] if the piece exists.
	Begin(ctx context.Context, e *Entry, h *pieceformat.Header) (Target, error)
	// DropPart removes the remains of a failed copy.
	DropPart(e *Entry)
	// Log logs why an entry was not copied.
	Log(e *Entry, cause error)
}

// Taker is a [Level] that fetches entries itself. The entry is pinned until Take returns. The error is [ErrRefused] if the
// entry is not taken.
type Taker interface {
	Take(ctx context.Context, e *Entry) error
}

// Counters count the moves to one level by kind.
type Counters [Kinds]Counter

// Counter counts moves.
type Counter struct {
	Done, Bytes atomic.Uint64 // moves that copied an entry, and their bytes
	Shed        atomic.Uint64 // dropped, because too many were waiting or there was no time
	Refused     atomic.Uint64 // not wanted by the policy of the level
	Cancelled   atomic.Uint64 // no longer wanted, or made already
	Failed      atomic.Uint64 // failed because of a fault or lack of room
}

// Entry is an entry to be copied. It implements [Move].
type Entry struct {
	*entries.Move
	Kind Kind
	From *Origin
	To   Level
	// Wanted means that the level has already admitted the entry.
	Wanted bool
	// Here means that a load makes the copy. Anything that would wait or take long is left to a copy in the background.
	Here  bool
	Then  func() // called when the copy exists
	Ended func() // called with the lock of the set held when the move has ended

	Namespace *catalog.Namespace
	Pieces    uint64
	size      int64
	tries     int
}

// mostTries is the maximum number of times that a move looks for room.
const mostTries = 8

// Offer asks whether the level wants the entry, and queues the move. If it is not queued, the move is over, and an entry that
// leaves can go.
func (v *Entry) Offer(m *Mover) (queued bool) {
	n := &v.To.Count()[v.Kind]
	switch wanted, known := v.wanted(); {
	case !known:
		n.Cancelled.Add(1)
	case !wanted:
		n.Refused.Add(1)
	case v.queued(m):
		return true
	default:
		n.Shed.Add(1)
	}
	v.end()
	return false
}

// queued queues the move. From then on, changes of its value are reported to the mover.
func (v *Entry) queued(m *Mover) bool {
	v.From.Lock()
	v.Changed = func() { m.Changed(v) }
	v.From.Unlock()
	return m.Offer(v)
}

// wanted asks the level whether it wants the entry. known is false if the entry is gone or already has a copy in the level. It
// is also false for an entry that leaves, was taken from another host, and has had no hit.
func (v *Entry) wanted() (wanted, known bool) {
	r := v.From
	r.Lock()
	e := r.Index.At(v.Slot)
	if v.Cancelled() || !e.Is(index.Complete) || v.Leaves() && r.Hits.Taken(v.Slot) {
		r.Unlock()
		return false, false
	}
	class := r.ClassOf(v.Slot)
	v.Namespace, v.size = class.Namespace, r.Index.Bytes(v.Slot)
	c := abi.Candidate{
		Key: v.Fingerprint, ParentKey: e.Parent(), Namespace: class.Namespace.ID, Group: class.Group,
		Size: r.Index.EntryUnits(v.Slot, e), Depth: e.Depth(), Tenant: r.TenantOf(v.Slot), Time: r.Clock(),
		Kind: v.Kind.record(), From: uint8(r.Level), To: uint8(v.To.Number()), Hits: r.Hits.Of(v.Slot),
	}
	r.Unlock()
	if v.To.Holds(v.Fingerprint) {
		return false, false
	}
	if v.Wanted {
		return true, true
	}
	v.To.Facts(&c)
	if admitted, asked := v.To.Admits(&c, v.Namespace); asked {
		return admitted, true
	}
	if admits, decided := guest.Elsewhere(&c); decided {
		return admits, true
	}
	return v.Kind == Prefetch || policy.AdmitsByDefault(&c), true
}

// record returns the kind for policies. An entry of Through has just been stored.
func (k Kind) record() abi.CandidateKind {
	return [Kinds]abi.CandidateKind{abi.KindDemotion, abi.KindPromotion, abi.KindNew, abi.KindPromotion, abi.KindDemotion}[k]
}

// Bytes implements [Move].
func (v *Entry) Bytes() int64 { return v.size }

// Level implements [Move].
func (v *Entry) Level() int { return max(v.From.Level, v.To.Number()) }

// worth is the value of a hit on a copy of each kind. Without a copy of an entry that leaves, the next hit would be computed.
// That takes longer than a load from the farther level, or the engine would compute it anyway. A copy to a nearer level saves
// the load from the farther one, for an entry that was requested just now or is new. A copy of Through has no use until the
// host stops, since the entry is also near.
var worth = [Kinds]float64{Demotion: 2, Promotion: 2, Through: 1, Prefetch: 2, Taken: 1}

// unasked is the expected number of hits of an entry without hits.
const unasked = 0.5

// Value implements [Move]. It is the expected number of hits, which equals the past number, times the value of a hit.
func (v *Entry) Value() float64 {
	hits, leaves := v.Worth()
	kind := v.Kind
	if leaves {
		kind = Demotion
	}
	least := unasked
	if v.Wanted { // the entry is new and should have been near from the beginning
		least = 1
	}
	return max(least, float64(hits)) * worth[kind]
}

// Leaves reports whether the entry was about to leave when the move was offered.
func (v *Entry) Leaves() bool { return v.Kind == Demotion }

// Shed implements [Move].
func (v *Entry) Shed() {
	if n := &v.To.Count()[v.Kind]; v.Cancelled() {
		n.Cancelled.Add(1)
	} else {
		n.Shed.Add(1)
	}
	v.end()
}

func (v *Entry) end() {
	v.From.Lock()
	defer v.From.Unlock()
	v.From.Moves.EndCopy(v.Move)
	if v.Ended != nil {
		v.Ended()
	}
}

// Run implements [Move]. It copies the pieces one after the other. If the level has no room without a loss, the move is tried
// again after another move has ended.
func (v *Entry) Run(ctx context.Context, c *Copier) (again bool) {
	defer func() {
		if again {
			v.pause()
		} else {
			v.end()
		}
	}()
	if !v.begin() {
		v.To.Count()[v.Kind].Cancelled.Add(1)
		return false
	}
	defer v.From.Copies.Unwatch(v.Fingerprint)
	err := v.copyAll(ctx, c)
	if ctx.Err() != nil && err != nil {
		err = ErrCancelled
	}
	if errors.Is(err, ErrBehind) && !v.Cancelled() {
		if v.tries++; v.tries < mostTries {
			v.To.DropPart(v)
			return true
		}
	}
	v.account(err, c.copied)
	return false
}

// begin pins the entry for its copy. It returns false if the copy cannot be made.
func (v *Entry) begin() bool {
	r := v.From
	r.Lock()
	defer r.Unlock()
	if v.Cancelled() || !r.Moves.BeginCopy(v.Move) {
		return false
	}
	v.Pieces = r.Index.Pieces(v.Slot)
	r.Copies.Watch(v.Fingerprint, r.Set)
	return true
}

// account counts the result of a copy of so many bytes, and removes the remains of a failed one.
func (v *Entry) account(err error, copied int64) {
	n := &v.To.Count()[v.Kind]
	if err != nil {
		v.To.DropPart(v)
	}
	switch {
	case err == nil:
		if v.Then != nil {
			v.Then()
		}
		if copied == 0 { // a level had all pieces already
			n.Cancelled.Add(1)
			break
		}
		n.Done.Add(1)
		n.Bytes.Add(uint64(v.size))
	case errors.Is(err, ErrRefused):
		n.Refused.Add(1)
	case v.Cancelled(), errors.Is(err, ErrCancelled):
		n.Cancelled.Add(1)
	case errors.Is(err, ErrBehind):
		n.Shed.Add(1)
	default:
		n.Failed.Add(1)
		v.To.Log(v, err)
	}
}

// BeginHere begins a move that is never queued, because the caller has the bytes and copies them. If the level does not want
// the entry, or the entry cannot be copied now, the move is over and BeginHere returns false. Otherwise the caller must call
// EndHere.
func (v *Entry) BeginHere() bool {
	v.Here = true
	if wanted, known := v.wanted(); wanted && known && v.begin() {
		return true
	}
	v.end()
	return false
}

// EndHere ends a move of BeginHere. The error is the reason why there is no copy.
func (v *Entry) EndHere(err error) {
	v.account(err, v.size)
	v.From.Copies.Unwatch(v.Fingerprint)
	v.end()
}

// copyAll copies the pieces, or makes a Taker fetch them.
func (v *Entry) copyAll(ctx context.Context, c *Copier) error {
	if t, is := v.To.(Taker); is {
		if err := c.budget.yield(ctx); err != nil {
			return err
		}
		if err := c.budget.take(ctx, int(v.size)); err != nil {
			return err
		}
		c.copied = v.size
		return t.Take(ctx, v)
	}
	for rank := range entries.Ranks(v.Pieces) {
		if err := v.copyPiece(ctx, c, rank); err != nil && !errors.Is(err, entries.ErrResident) {
			return err
		}
	}
	return nil
}

// pause ends an attempt that will be repeated.
func (v *Entry) pause() {
	v.From.Lock()
	defer v.From.Unlock()
	v.From.Moves.PauseCopy(v.Move)
}

func (v *Entry) copyPiece(ctx context.Context, c *Copier, rank uint32) error {
	p, err := v.From.Open(v.Move, rank)
	if err != nil {
		return err
	}
	defer p.Close()
	_, err = c.Copy(ctx, p, func(ctx context.Context, h *pieceformat.Header) (Target, error) {
		return v.To.Begin(ctx, v, h)
	})
	if pieceformat.IsDamage(err) || errors.Is(err, kv.ErrChecksum) || errors.Is(err, pieceformat.ErrWrongPiece) {
		p.Bad(err)
	}
	return err
}
