package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// rig is the only host of a shared root, and so its evictor. It makes a step when it is told to.
type rig struct {
	*joint
	testing.TB
	b      backend
	class  *catalog.Class
	now    time.Duration
	faults *faultfs.FS
}

const capacityBytes = 64 * pieceformat.Page

func newRig(t testing.TB) *rig {
	r := &rig{TB: t, now: time.Hour, faults: faultfs.New(staging.OS())}
	f := newFixture(t, 1, 2, func(c *Config) {
		c.FS, c.Now, c.HostID = r.faults, func() time.Time { return time.Unix(1_700_000_000, 0) }, "a"
		c.IOTimeout, c.UpkeepEvery, c.ScanWorkers = -1, time.Hour, 1
		root := &c.Roots[0]
		root.Capacity, root.MaxEntries, root.Shared = capacityBytes, 64, true
		root.Scheduler = &Scheduler{
			Now: func() time.Duration { return r.now }, Wait: func(step func()) { r.now += time.Second; step() },
		}
	})
	r.joint, r.class = f.shared(), f.space.Class(0)
	r.b = backend{r.joint}
	r.kept.Catalog.Tenants.Number(0) // of all entries here
	r.pass(4)
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	must(r, err)
}

// leave has an entry leave as far as its files.
func (r *rig) leave(slot uint32) entries.Eviction {
	r.set.Lock()
	v := r.set.BeginEvict(slot)
	r.set.Unlock()
	r.propose(&v, v.Pieces)
	return v
}

// pass makes so many steps.
func (r *rig) pass(n int) {
	for range n {
		r.now += time.Second
		r.step(r.Context())
	}
}

func keyOf(n uint64) (k kv.Key) {
	k[0], k[1] = byte(n), 1
	return k
}

// write makes the file of a piece, as another host does, and returns its name and header.
func (r *rig) write(n uint64, rank uint32) (string, *pieceformat.Header) {
	r.Helper()
	k := keyOf(n)
	name := r.kept.Slash + r.class.Builtin(&k, rank)
	plan := r.class.Plan
	h := &pieceformat.Header{
		Namespace: r.class.Namespace.Digest, Key: k, Group: r.class.Group, Rank: rank, Blocks: plan.Geometry().Blocks,
		Pieces: 3, StoreTime: 1, Payload: plan.PayloadBytes(), Plan: plan.Digest(), Algorithm: kv.XXH3,
		Extent: kv.ExtentBytes, Extents: uint32((plan.PayloadBytes() + kv.ExtentBytes - 1) / kv.ExtentBytes),
		DataOffset: pieceformat.DataOffset(len(plan.Extents()), false),
	}
	b := make([]byte, h.FileBytes())
	for i := range b {
		b[i] = 1 // no holes
	}
	h.TableSum = pieceformat.PutTable(b[pieceformat.Page:], make([]uint64, h.Extents))
	h.Encode(b)
	r.must(os.MkdirAll(filepath.Dir(name), 0o700))
	r.must(os.WriteFile(name, b, 0o600))
	return name, h
}

func (r *rig) found(name string, h *pieceformat.Header) {
	judge{r.joint}.Found(nil, strings.TrimPrefix(name, r.kept.Slash), "", r.class, h, r.class.FileBytes())
}

// stored writes rank 0 of a key's entry, and has this host find it. It returns the file's name.
func (r *rig) stored(n uint64) string {
	r.Helper()
	name, h := r.write(n, 0)
	r.found(name, h)
	return name
}

// victim names rank 0 of a key's entry.
func (r *rig) victim(n uint64) *shared.Victim {
	return &shared.Victim{
		Namespace: r.class.Namespace.Digest, Group: r.class.Group, Key: keyOf(n), Pieces: 1, Bytes: r.class.FileBytes(),
	}
}

// proposed is a victim that this host does not veto.
func (r *rig) proposed(n uint64) *shared.Victim {
	r.Helper()
	v := r.victim(n)
	if !r.b.Propose(v) {
		r.Fatal("an entry that nobody uses is vetoed")
	}
	return v
}

// expect compares what the account has, in pieces: entries, and what else this host counts.
func (r *rig) expect(when string, entries, orphans int64) {
	r.Helper()
	size, f := r.class.FileBytes(), r.set.Account.Figures()
	if f.Entries != entries*size || f.Orphans != orphans*size {
		r.Errorf("%s: entries take %d bytes and others %d, want %d and %d pieces of %d", when, f.Entries, f.Orphans,
			entries, orphans, size)
	}
}

func (r *rig) slot(n uint64) uint32 {
	r.set.Lock()
	defer r.set.Unlock()
	k := keyOf(n)
	return r.set.Index.Find(kv.Fingerprint(r.class.Namespace.Digest, r.class.Group, k), r.class.Base, &k)
}

// begin reserves a piece of a new entry.
func (r *rig) begin(n uint64, credit *shared.Credit) (m entries.Mark, err error) {
	k := keyOf(n)
	m.Fingerprint = kv.Fingerprint(r.class.Namespace.Digest, r.class.Group, k)
	err = r.reserveCredit(r.Context(), capacity.Want{Bytes: r.class.FileBytes()}, credit, func() (err error) {
		if err = r.mayEnter(r.class, &k, m.Fingerprint); err != nil {
			r.set.Account.Release(0, r.class.FileBytes()) // as a reservation does that fails
			return err
		}
		m.Slot, err = r.set.Insert(&entries.New{Fingerprint: m.Fingerprint, Class: r.class, Key: &k, Reserved: 1})
		return err
	})
	return m, err
}

// end ends a put that has written nothing.
func (r *rig) end(m entries.Mark, credit shared.Credit) {
	r.returnCredit(credit)
	r.set.Lock()
	defer r.set.Unlock()
	r.set.Unreserve(m.Slot, 0, r.class.FileBytes())
	r.set.EndWrite(m, 0)
}

// TestReserve: bytes are taken against credit, and both are given back when no entry can be made.
func TestReserve(t *testing.T) {
	r := newRig(t)
	free := r.stats().Free
	var credit, none shared.Credit
	m, err := r.begin(1, &credit)
	r.must(err)
	r.expect("reserved", 1, 0)
	if r.inFlight != r.class.FileBytes() || credit.Bytes() != r.class.FileBytes() {
		t.Errorf("%d bytes are in flight, the credit is of %d", r.inFlight, credit.Bytes())
	}
	if _, err := r.begin(1, &none); !errors.Is(err, entries.ErrResident) {
		t.Errorf("a second entry of the key: %v", err)
	}
	if none.Bytes() != 0 || r.inFlight != r.class.FileBytes() {
		t.Errorf("a put that failed keeps credit of %d bytes, %d are in flight", none.Bytes(), r.inFlight)
	}
	r.end(m, credit)
	r.expect("given up", 0, 0)
	r.pass(2)
	if r.inFlight != 0 || r.stats().Free < free {
		t.Errorf("%d bytes are in flight, credit of %d is free, %d before", r.inFlight, r.stats().Free, free)
	}
}

// TestNoCreditIsNoSpace: a put that the evictor gives no credit fails, and leaves nothing in the account.
func TestNoCreditIsNoSpace(t *testing.T) {
	r := newRig(t)
	var held []shared.Credit
	for n := uint64(1); ; n++ {
		var credit shared.Credit
		if _, err := r.begin(n, &credit); errors.Is(err, capacity.ErrNoSpace) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		held = append(held, credit)
	}
	r.expect("full", int64(len(held)), 0)
	if used := r.set.Account.Figures().Used; used > capacityBytes || len(held) < 2 {
		t.Errorf("%d puts have %d bytes of %d", len(held), used, capacityBytes)
	}
}

// TestFound: what a scan meets is in the account once: as an entry, beside a put of the same entry, or beside a victim
// in the journal.
func TestFound(t *testing.T) {
	t.Run("a piece", func(t *testing.T) {
		r := newRig(t)
		name, h := r.write(1, 0)
		r.found(name, h)
		r.found(name, h)
		r.expect("found twice", 1, 0)
	})
	t.Run("a piece that has gone", func(t *testing.T) {
		r := newRig(t)
		name, h := r.write(1, 0)
		r.must(os.Remove(name))
		r.found(name, h)
		r.expect("gone", 0, 0)
	})
	t.Run("by a scan of an earlier incarnation", func(t *testing.T) {
		r := newRig(t)
		name, h := r.write(1, 0)
		r.scanned.Add(1)
		r.found(name, h)
		if r.slot(1) != index.None {
			t.Error("it is served")
		}
	})
	t.Run("a piece that this host writes", func(t *testing.T) {
		r := newRig(t)
		var credit shared.Credit
		m, err := r.begin(1, &credit)
		r.must(err)
		name, h := r.write(1, 0)
		r.found(name, h)
		r.pass(2)
		r.expect("while it is written", 1, 1)
		if used := r.b.Used(); used != r.class.FileBytes() {
			t.Errorf("as the evictor it reckons with %d bytes", used)
		}
		r.end(m, credit)
		r.pass(1)
		r.expect("the put has come to nothing", 1, 0)
	})
	for removed, left := range map[bool]int64{true: 0, false: 1} {
		t.Run(map[bool]string{true: "a victim that goes", false: "a victim that stays"}[removed], func(t *testing.T) {
			r := newRig(t)
			name, h := r.write(1, 0)
			v := r.proposed(1)
			r.found(name, h)
			r.found(name, h)
			r.expect("proposed", 0, 1)
			var credit shared.Credit
			if _, err := r.begin(1, &credit); !errors.Is(err, capacity.ErrNoSpace) {
				t.Errorf("a put of a victim: %v", err)
			}
			if removed {
				r.must(os.Remove(name))
			}
			r.b.Decide(v, removed)
			r.expect("decided", left, 0)
		})
	}
}

// TestLeftAlone: what is of no use to this host stays where it is, and is in the account until the next scan, which
// counts it again.
func TestLeftAlone(t *testing.T) {
	r := newRig(t)
	name, _ := r.write(1, 0)
	info, err := r.kept.FS.Stat(name)
	r.must(err)
	j := judge{r.joint}
	j.Unsound(nil, name, "x", info, pieceformat.ErrDamaged)
	j.Unsound(nil, name, "x", info, fs.ErrNotExist) // it has gone since
	j.Unknown(nil, name, r.class.FileBytes(), catalog.ErrUnknownNamespace)
	r.withdraw(&Put{class: r.class, target: name})
	r.expect("left alone", 0, 3)
	if _, err := os.Stat(name); err != nil {
		t.Error(err)
	}
	r.must(os.Truncate(name, 0))
	r.must(r.rescan(t.Context()))
	r.expect("after a scan of an empty file", 0, 0)
}

// TestCannotBeRead: a file that a scan cannot read is in the account, and one that it cannot read once is an entry.
func TestCannotBeRead(t *testing.T) {
	for fault, missed := range map[string]int64{
		"stat **_r0.kv 1st: eio": 0, "open **_r0.kv 1st: emfile": 0, "read **_r0.kv 1st: eio": 0, "read **_r0.kv: eio": 1,
	} {
		r := newRig(t)
		r.write(1, 0)
		rules, err := faultfs.ParseRules(fault)
		r.must(err)
		r.faults.Set(rules...)
		r.must(r.rescan(t.Context()))
		r.expect(fault, 1-missed, missed)
	}
}

// TestProposeAndFence: an entry that is written or leased is vetoed, one that is not leaves at once, and a host that is
// given up forgets all of them with their bytes.
func TestProposeAndFence(t *testing.T) {
	r := newRig(t)
	var credit shared.Credit
	m, err := r.begin(1, &credit)
	r.must(err)
	r.stored(1)
	r.stored(2)
	r.expect("a piece that is written, and is there, beside another", 2, 1)
	if r.b.Propose(r.victim(1)) {
		t.Error("an entry that is being written is not vetoed")
	}
	r.proposed(2)
	r.stored(3)
	r.propose(&entries.Eviction{Class: r.class, Key: keyOf(4), Pieces: 1}, 1) // there is no file
	if got := r.set.Count.Vanished; got != 1 {
		t.Errorf("%d have vanished, want 1", got)
	}
	name, h := r.write(5, 0) // a victim of others, which a scan meets
	r.proposed(5)
	r.found(name, h)
	r.b.Fenced()
	r.end(m, credit)
	r.expect("forgotten", 0, 0)
	if len(r.pending)+len(r.awaited)+len(r.met) != 0 || r.set.Index.Len() != 0 {
		t.Errorf("%d victims, %d awaited, %d met and %d entries are left", len(r.pending), len(r.awaited), len(r.met),
			r.set.Index.Len())
	}
}

// TestGuard: a file cannot be written once the credit that it was made with is void.
func TestGuard(t *testing.T) {
	r := newRig(t)
	var credit shared.Credit
	_, err := r.begin(1, &credit)
	r.must(err)
	temp, err := r.member.Temp("x", credit)
	r.must(err)
	r.must(os.MkdirAll(filepath.Dir(temp), 0o700))
	under, err := staging.OS().OpenFile(temp, os.O_RDWR|os.O_CREATE, 0o600)
	r.must(err)
	f := r.guard(under, credit)
	defer f.Close()
	if _, err := f.WriteAt([]byte("a"), 0); err != nil {
		t.Error(err)
	}
	r.must(os.RemoveAll(filepath.Dir(filepath.Dir(temp)))) // as whoever gives it up does
	r.pass(3)
	if _, err := f.WriteAt([]byte("b"), 0); !errors.Is(err, shared.ErrFenced) {
		t.Errorf("writing: %v", err)
	}
	if err := f.Allocate(1); !errors.Is(err, shared.ErrFenced) {
		t.Errorf("allocating: %v", err)
	}
}

// TestAdmissionEnds: a scan that no evictor admits ends with its context.
func TestAdmissionEnds(t *testing.T) {
	r := newRig(t)
	r.joint.leave()
	ctx, stop := context.WithCancel(t.Context())
	stop()
	r.root.cfg.Scheduler = nil
	if err := r.scan(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("scan under a context that is done: error %v, want %v", err, context.Canceled)
	}
}
