package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// joint is the [owner] of a root that several hosts share. One of the hosts evicts for all. It grants the others credit for
// their writes, and removes the pieces that they report. Bytes of an entry are reserved rank by rank, because other hosts may
// write the other ranks. No entry is granted to lookups while this host may have missed a removal.
//
// A joint owner connects the entries and files of its root with a member of the protocol in package shared, which explains why
// the protocol is correct. A piece is written against credit. Temporaries are in the directory of the member. No host frees the
// name of a damaged or unwanted file itself. It proposes the removal (propose, reportDamaged), and the evictor removes the file
// when no host has leased it.
//
// The counters are guarded by the lock of the entries. While it is held, no file is accessed and the member is not asked to
// write.
type joint struct {
	root  *root
	kept  *keptDir
	scans *recovery
	began time.Time

	newMember func() (*shared.Member, error)
	walk      func(ctx context.Context, c *scan) error // scans every file
	confirms  bool                                     // walk forgets entries without files, so that entries may outlive a membership
	audits    *audits                                  // set for a bucket
	member    *shared.Member                           // set by join
	ended     chan struct{}                            // closed when the steps have ended
	stop      context.CancelFunc
	gate      []io.Closer // locks held until this host has joined the others

	busy    atomic.Bool   // the first scan is running
	ticket  uint64        // ticket of the last scan that was started; used by scan and then by steps
	scanned atomic.Uint64 // the same, for the scan's judge

	set *entries.Set // its lock guards the following fields

	firstScan  *scan // the first scan while it is running; the evict policy is told about entries when all are known
	pending    map[shared.ID]*pendingEviction
	awaited    map[met]int64 // bytes of files that others published while this host writes pieces of the same entry
	met        []sight       // pieces that scans found of entries that this host is writing
	overlooked int64         // bytes of files that the last scan could not use
	// inFlight is the bytes in the account that are covered by credit: pieces being written, and temporaries that could not be
	// removed.
	inFlight int64
	waiting  int // puts that wait for credit
	// removed holds entries that were removed since the running scan began. It is nil if no scan is running.
	removed map[shared.ID]bool
}

// audits lists the bucket of a [joint] owner, in scans and when the member requests it. A list finds pieces that a host stored
// without a record before it died: other hosts cannot see the temporaries of a bucket.
type audits struct{ root *joint }

// met identifies a file of an entry by its path below the root.
type met struct {
	shared.ID
	rel string
}

// pendingEviction is an entry that is in the journal, or that this host wants to have there. It is neither granted nor stored.
type pendingEviction struct {
	entries.Eviction
	entry    bool            // Eviction belongs to an entry of the index, which is leaving
	batch    bool            // the entry is in the journal
	orphaned int64           // bytes in the account in addition to the entry's
	learned  map[string]bool // files found after the eviction began; their bytes are in orphaned or belong to the entry
}

func (d *pendingEviction) learn(rel string) {
	if d.learned == nil {
		d.learned = map[string]bool{}
	}
	d.learned[rel] = true
}

// files returns the files of the entry that is leaving.
func (d *pendingEviction) files() []string {
	if !d.entry {
		return nil
	}
	return filesOf(d.Class, &d.Key, d.Pieces, d.Names)
}

func (d *pendingEviction) has(rel string) bool { return slices.Contains(d.files(), rel) }

// backend implements [shared.Backend] and is what the member calls on this host.
type backend struct{ *joint }

func (r backend) classOf(ns kv.Digest, group uint32, key *kv.Key) (*catalog.Class, error) {
	h := pieceformat.Header{Namespace: ns, Group: group, Key: *key}
	cl, err := r.kept.Catalog.ClassFor(&h)
	if errors.Is(err, catalog.ErrUnknownNamespace) {
		if err = r.kept.loadNamespaces(); err == nil { // an engine of another host has opened it
			cl, err = r.kept.Catalog.ClassFor(&h)
		}
	}
	return cl, err
}

func (r backend) Learn(rec *shared.Record) bool {
	cl, err := r.classOf(rec.Namespace, rec.Group, &rec.Key)
	if err != nil {
		r.kept.Log.Warn("another host's piece is of a namespace that cannot be read; it is found at the next start",
			"key", rec.Key, "error", err)
		r.overlook(rec.Bytes)
		return true
	}
	if rec.Bytes > cl.Bound() {
		r.kept.Log.Warn("another host tells of more bytes than a piece has; its file is looked at", "key", rec.Key, "bytes", rec.Bytes)
		r.look(cl.NameOf(rec.Names, &rec.Key, rec.Rank), cl.FileBytes())
		return true
	}
	h := pieceformat.Header{
		Namespace: rec.Namespace, Group: rec.Group, Rank: rec.Rank, Key: rec.Key, Parent: rec.Parent, Depth: rec.Depth,
		Tenant: rec.Tenant,
		Pieces: rec.Pieces, StoreTime: rec.StoreTime, DataOffset: pieceformat.Page,
		Payload: max(pieceformat.Page, rec.Bytes-pieceformat.Page),
	}
	return r.see(cl, &h, cl.NameOf(rec.Names, &rec.Key, rec.Rank), rec.Bytes) != awaited
}

// booked is the way in which the bytes of a piece entered the account.
type booked uint8

const (
	served   booked = iota // as bytes of an entry, or of a file that is not served
	withheld               // in addition to an entry that is in the journal, until that is decided
	awaited                // in addition to an entry of which this host is writing or removing pieces; the caller must try again
)

// see books a piece that another host stored or that a scan has found, given its path below the root. All of it happens under
// one lock. Otherwise a put or a removal in between could leave the piece out of the account, and the evictor would grant its
// room again.
func (r backend) see(cl *catalog.Class, h *pieceformat.Header, rel string, allocated int64) booked {
	tenant := r.kept.Catalog.Tenants.Number(h.Tenant)
	h.Pieces = 1 << h.Rank // other hosts may write the other ranks, so nothing is reserved for them
	id := shared.ID{Namespace: h.Namespace, Group: h.Group, Key: h.Key}
	at, fp := met{id, rel}, kv.Fingerprint(h.Namespace, h.Group, h.Key)
	r.set.Lock()
	defer r.set.Unlock()
	d, slot := r.pending[id], r.set.Index.Find(fp, cl.Base, &h.Key)
	if d == nil && slot != index.None && r.set.Busy(slot) &&
		(r.set.Index.At(slot).Is(index.Evicting) || r.set.Index.Pieces(slot)&h.Pieces == 0) {
		// A running put will find the piece, or will fail.
		if r.awaited[at] == 0 {
			r.awaited[at] = allocated
			r.set.Account.Add(capacity.Orphans, allocated)
		}
		return awaited
	}
	r.set.Account.Remove(capacity.Orphans, r.awaited[at])
	delete(r.awaited, at)
	if d != nil {
		if !d.learned[rel] && !d.has(rel) {
			d.orphaned += allocated
			r.set.Account.Add(capacity.Orphans, allocated)
		}
		d.learn(rel) // even if the entry has the file: a host that already knows of its removal may have stored it again
		return withheld
	}
	late := r.scans.newScan(true)
	sight := r.firstScan
	if sight == nil {
		sight = late
	}
	name := rel
	if rel == cl.Builtin(&h.Key, h.Rank) {
		name = ""
	}
	if twice := sight.AddOf(tenant, cl, h, name, allocated); twice.Other != "" {
		// Two hosts stored the piece under two names at the same time. All hosts learn of both, and both are removed with the
		// entry.
		r.set.AddFile(twice, h.Rank, rel, allocated)
		return served
	}
	r.bookOverlooked(late.Orphaned())
	if slot = r.set.Index.Find(fp, cl.Base, &h.Key); sight == late && slot != index.None &&
		!r.set.Index.At(slot).Is(index.Announced) {
		r.set.Index.Touch(slot)
		r.set.Evictor.Announce(abi.OpResident, slot, fp, 0)
	}
	return served
}

func (r backend) Touched(prints []uint64) {
	r.set.Lock()
	defer r.set.Unlock()
	for _, fp := range prints {
		if slot := r.set.Index.FindFingerprint(fp); slot != index.None {
			if e := r.set.Index.At(slot); e.Is(index.Announced) && !e.Is(index.Evicting) {
				r.set.Index.Touch(slot)
				r.set.Evictor.Tell(abi.OpTouch, slot, fp, 0)
			}
		}
	}
}

func (r backend) Used() int64 {
	r.set.Lock()
	defer r.set.Unlock()
	// If other users of the disk occupy part of the capacity, that part counts as used. A shortage that may be temporary is left
	// out, since an evictor frees much space at once.
	others := max(0, r.root.cfg.Capacity-r.set.Account.Lasting())
	return r.set.Account.Figures().Used - r.inFlight + others
}

func (r backend) Paths(v *shared.Victim) ([]string, error) {
	cl, err := r.classOf(v.Namespace, v.Group, &v.Key)
	if err != nil {
		return nil, fmt.Errorf("store: a victim has no name: %w", err)
	}
	var paths []string
	for _, rel := range filesOf(cl, &v.Key, v.Pieces, v.Names) {
		paths = append(paths, r.kept.Slash+rel)
	}
	return paths, nil
}

// filesOf returns the paths of an entry's files below the root.
func filesOf(cl *catalog.Class, key *kv.Key, pieces uint64, named []pieceformat.Name) (list []string) {
	for rank := range entries.Ranks(pieces) {
		before := len(list)
		for _, n := range named {
			if n.Rank == rank {
				list = append(list, n.Path)
			}
		}
		if len(list) == before {
			list = append(list, cl.Builtin(key, rank))
		}
	}
	return list
}

func (r backend) Identify(temp string, info staging.Info) (shared.Record, error) {
	h, _, err := r.kept.Look(temp)
	if pieceformat.IsDamage(err) {
		return shared.Record{}, fmt.Errorf("%w: %w", shared.ErrDamaged, err)
	} else if err != nil {
		return shared.Record{}, err
	}
	return shared.Record{
		Namespace: h.Namespace, Group: h.Group, Rank: h.Rank, Key: h.Key, Parent: h.Parent, Depth: h.Depth, Tenant: h.Tenant,
		Pieces: h.Pieces, Bytes: pieceformat.Padded(info.Allocated), StoreTime: h.StoreTime, Names: namesOf(h.Rank, h.Name),
	}, nil
}

// namesOf returns the list with a piece's name. It is empty for the built-in name.
func namesOf(rank uint32, name string) []pieceformat.Name {
	if name == "" {
		return nil
	}
	return []pieceformat.Name{{Rank: rank, Path: name}}
}

// overlook books a file that is not served. It takes the lock.
func (r *joint) overlook(bytes int64) {
	r.set.Lock()
	defer r.set.Unlock()
	r.bookOverlooked(bytes)
}

func (r *joint) bookOverlooked(bytes int64) {
	r.set.Account.Add(capacity.Orphans, bytes)
	r.overlooked += bytes
}

func (r backend) Propose(v *shared.Victim) bool {
	cl, err := r.classOf(v.Namespace, v.Group, &v.Key)
	r.set.Lock()
	defer r.set.Unlock()
	d := r.pending[v.ID()]
	if d == nil {
		d = &pendingEviction{}
	}
	if err == nil && !d.entry {
		fp := kv.Fingerprint(v.Namespace, v.Group, v.Key)
		if slot := r.set.Index.Find(fp, cl.Base, &v.Key); slot != index.None && !r.set.Index.At(slot).Is(index.Evicting) {
			if r.set.Busy(slot) || r.set.Index.At(slot).Pins() > 0 {
				if !d.batch && d.orphaned == 0 { // this host's own put reported the piece, and Decide is not called after a veto
					delete(r.pending, v.ID())
				}
				return false
			}
			d.Eviction, d.entry = r.set.BeginEvict(slot), true
		}
	}
	d.batch = true
	r.pending[v.ID()] = d
	return true
}

func (r backend) Decide(v *shared.Victim, removed bool) {
	r.set.Lock()
	d := r.pending[v.ID()]
	if d == nil {
		r.set.Unlock()
		return
	}
	cl, err := d.Class, error(nil)
	if !d.entry {
		r.set.Unlock()
		cl, err = r.classOf(v.Namespace, v.Group, &v.Key)
		r.set.Lock()
	}
	delete(r.pending, v.ID())
	if r.removed != nil && removed {
		r.removed[v.ID()] = true
	}
	if err != nil {
		r.overlooked += d.orphaned // existing files stay in the account until the next scan
		r.set.WakeJoiners()
		r.set.Unlock()
		r.kept.Log.Error("what became of a victim cannot be seen", "key", v.Key, "error", err)
		return
	}
	rest := d.rest(filesOf(cl, &v.Key, v.Pieces, v.Names), removed)
	r.set.Account.Remove(capacity.Orphans, d.orphaned)
	if d.entry {
		if removed {
			r.set.Count.Evictions++
		}
		r.set.FinishEvict(&d.Eviction)
	}
	r.set.WakeJoiners()
	r.set.Unlock()
	for _, rel := range rest { // a file that still exists may be granted again
		r.look(rel, cl.FileBytes())
	}
}

// rest returns the files that may be left after the decision about a victim, so that they must be examined. They are the files
// of a victim that was spared, files that were published again, and files that the evictor did not know when it named the
// victim.
func (d *pendingEviction) rest(victim []string, removed bool) (rest []string) {
	for _, rel := range d.files() {
		if !removed || !slices.Contains(victim, rel) {
			rest = append(rest, rel)
		}
	}
	if !removed {
		rest = append(rest, victim...)
	}
	rest = slices.AppendSeq(rest, maps.Keys(d.learned))
	slices.Sort(rest)
	return slices.Compact(rest)
}

// look examines a name: it enters the piece with this name, or books another file.
func (r backend) look(rel string, most int64) {
	name := r.kept.Slash + rel
	h, info, err := r.kept.Look(name)
	var cl *catalog.Class
	if err == nil {
		most = pieceformat.Padded(info.Allocated)
		cl, err = r.classOf(h.Namespace, h.Group, &h.Key)
	} else if pieceformat.IsDamage(err) {
		most = pieceformat.Padded(info.Allocated)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		r.kept.Log.Warn("file of a shared root left alone; fsck says more", "file", name, "error", err)
		r.overlook(most)
	case r.see(cl, &h, rel, most) == awaited:
		r.meet(sight{rel, cl, h, most})
	}
}

// forgetStep is the maximum number of slots that Fenced visits under one lock.
const forgetStep = 1 << 12

// Fenced implements [shared.Backend]. It leaves files alone, because the next scan finds them. If that scan examines the files
// of each entry, the entries stay. Until then, a load of an entry fails if its file is gone.
func (r backend) Fenced() {
	r.set.Lock()
	for _, d := range r.pending {
		r.set.Account.Remove(capacity.Orphans, d.orphaned)
		if d.entry {
			r.set.FinishEvict(&d.Eviction)
		}
	}
	clear(r.pending)
	for _, bytes := range r.awaited {
		r.set.Account.Remove(capacity.Orphans, bytes)
	}
	clear(r.awaited)
	r.met = nil
	high := r.set.Index.High()
	if r.confirms {
		high = 0
	}
	r.set.Unlock()
	// No new entries appear in slots that have been visited, because nothing is granted and no put can begin.
	for from := uint32(0); from < high; from += forgetStep {
		r.set.Lock()
		for slot := from; slot < min(from+forgetStep, high); slot++ {
			if r.set.Index.At(slot).Is(index.Live) {
				entries.Forget(r.set, slot)
			}
		}
		r.set.Unlock()
	}
}

func (r backend) Victims(bytes int64) (list []shared.Victim) {
	r.set.Lock()
	defer r.set.Unlock()
	if r.set.Scanning() {
		return nil // the oldest entries are not known yet
	}
	var slots [evictor.MaxVictims]uint32
	ask := abi.Ask{Bytes: uint64(bytes), MaxVictims: evictor.MaxVictims, Tenant: abi.None}
	if list = r.accept(slots[:r.set.Evictor.Ask(ask, slots[:])], bytes); len(list) == 0 {
		list = r.accept(slots[:r.set.Evictor.Instead(ask, slots[:])], bytes)
	}
	return list
}

// accept returns the named entries that can be evicted, until the given bytes are freed.
func (r backend) accept(named []uint32, bytes int64) (list []shared.Victim) {
	for _, slot := range named {
		if bytes <= 0 {
			break
		}
		if r.set.Busy(slot) || !r.set.Evictor.Evictable(slot) {
			r.set.Evictor.BadVictim()
			continue
		}
		cl := r.set.ClassOf(slot)
		list = append(list, shared.Victim{
			Namespace: cl.Namespace.Digest, Group: cl.Group, Key: r.set.Index.Key(slot), Pieces: r.set.Index.Pieces(slot),
			Names: r.set.Index.NamesOf(slot), Bytes: r.set.Index.Bytes(slot),
		})
		bytes -= r.set.Index.Bytes(slot)
	}
	return list
}

// sight is a piece that was found while this host was writing or removing other pieces of its entry.
type sight struct {
	rel       string
	class     *catalog.Class
	header    pieceformat.Header
	allocated int64
}

// meet hands a piece to lookAgain.
func (r *joint) meet(m sight) {
	r.set.Lock()
	r.met = append(r.met, m)
	r.set.Unlock()
}
