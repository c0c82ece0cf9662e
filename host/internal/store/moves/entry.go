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

// Origin is where entries come from: a root.
type Origin struct {
	*entries.Set
	Level  int
	Copies *entries.Copies
	Clock  func() uint64 // the time of events
	// Open opens a piece of an entry that is pinned.
	Open func(m *entries.Move, rank uint32) (Piece, error)
}

// Piece is a [Source] that is closed at the end. Bad says that its bytes are not what was stored.
type Piece interface {
	Source
	Bad(cause error)
	Close()
}

// Level is where they go.
type Level interface {
	Number() int
	Count() *Counters
	// Holds says whether the level has a whole copy of an entry.
	Holds(fp uint64) bool
	// Facts completes what is known of a candidate: whether any level has its parent, and a child of it, and how many other hosts have it.
	Facts(c *abi.Candidate)
	// Admits asks the level's admit policy; asked is false where there is none.
	Admits(c *abi.Candidate, ns *catalog.Namespace) (admitted, asked bool)
	// Begin makes the target of a piece with this header. The error is [entries.ErrResident] if it is there.
	Begin(ctx context.Context, e *Entry, h *pieceformat.Header) (Target, error)
	// DropPart removes what a copy that failed has left.
	DropPart(e *Entry)
	// Log logs why an entry was not copied.
	Log(e *Entry, cause error)
}

// Taker is a [Level] that is asked to fetch an entry, which is pinned until it has. [ErrRefused] says that it will not.
type Taker interface {
	Take(ctx context.Context, e *Entry) error
}

// Counters count moves to one level, by kind.
type Counters [Kinds]Counter

// Counter counts moves.
type Counter struct {
	Done, Bytes atomic.Uint64 // copied
	Shed        atomic.Uint64 // dropped, because too many were waiting or there was no time
	Refused     atomic.Uint64 // not wanted by the policy of the level
	Cancelled   atomic.Uint64 // not wanted any more, or there already
	Failed      atomic.Uint64 // faults, and no room
}

// Entry is an entry that is to be copied. It is a [Move].
type Entry struct {
	*entries.Move
	Kind Kind
	From *Origin
	To   Level
	// Wanted says that the level has admitted the entry already.
	Wanted bool
	// Here says that a load makes the copy: what would wait, or take long, is left to a copy in the background.
	Here  bool
	Then  func() // called when the copy is there
	Ended func() // called with the lock of the set when the move is over

	Namespace *catalog.Namespace
	Pieces    uint64
	size      int64
	tries     int
}

// mostTries bounds how often a move looks for room.
const mostTries = 8

// Offer asks whether the level wants the entry, and queues the move. An entry that leaves can go when it is not.
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

// queued queues the move. From then on the mover hears what changes its value.
func (v *Entry) queued(m *Mover) bool {
	v.From.Lock()
	v.Changed = func() { m.Changed(v) }
	v.From.Unlock()
	return m.Offer(v)
}

// wanted asks the level. known says that the entry is here, and has no copy there yet; what another host has offered leaves only after a hit.
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

// record is the kind as policies get it. What is written through has just been stored.
func (k Kind) record() abi.CandidateKind {
	return [Kinds]abi.CandidateKind{abi.KindDemotion, abi.KindPromotion, abi.KindNew, abi.KindPromotion, abi.KindDemotion}[k]
}

// Bytes implements [Move].
func (v *Entry) Bytes() int64 { return v.size }

// Level implements [Move].
func (v *Entry) Level() int { return max(v.From.Level, v.To.Number()) }

// worth is what a hit saves by a copy of each kind. Without a copy of what leaves the next hit is computed, which takes longer than a load
// from the farther level, or the engine would compute it anyway. What comes nearer saves that load, and it was asked for just now, or is new.
// What is written through is near all the same, until the host ends.
var worth = [Kinds]float64{Demotion: 2, Promotion: 2, Through: 1, Prefetch: 2, Taken: 1}

// unasked is how many hits are expected of what had none.
const unasked = 0.5

// Value implements [Move]: the hits that are expected, which are as many as there were, and what each saves.
func (v *Entry) Value() float64 {
	hits, leaves := v.Worth()
	kind := v.Kind
	if leaves {
		kind = Demotion
	}
	least := unasked
	if v.Wanted { // it is new, and should have been near from the beginning
		least = 1
	}
	return max(least, float64(hits)) * worth[kind]
}

// Leaves says that the entry was about to leave when the move was offered.
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

// Run implements [Move]: it copies the pieces one after the other. What the level has no room for without loss is tried
// again when another move has ended.
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
	v.account(err)
	return false
}

// begin pins the entry for its copy, and says false when none can be made.
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

// account enters what became of a copy that was begun, and removes what one that failed has left.
func (v *Entry) account(err error) {
	n := &v.To.Count()[v.Kind]
	if err != nil {
		v.To.DropPart(v)
	}
	switch {
	case err == nil:
		if v.Then != nil {
			v.Then()
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

// BeginHere begins a move that is never queued: its caller has the bytes, and copies them. It says false, and the move is over, where
// the level does not want the entry or it cannot be copied now. EndHere must follow otherwise.
func (v *Entry) BeginHere() bool {
	v.Here = true
	if wanted, known := v.wanted(); wanted && known && v.begin() {
		return true
	}
	v.end()
	return false
}

// EndHere ends a move that BeginHere has begun. The error says why there is no copy.
func (v *Entry) EndHere(err error) {
	v.account(err)
	v.From.Copies.Unwatch(v.Fingerprint)
	v.end()
}

// copyAll copies the pieces, or has them fetched.
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

// pause ends a copy that will be made anew.
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
