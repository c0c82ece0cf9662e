package store

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// turns lets hosts that share a root make their steps in turn, by a clock of its own. One that is paused makes none.
type turns struct {
	*testing.T
	dir    string
	mu     sync.Mutex
	now    time.Duration
	hosts  []*fixture
	paused []*fixture
}

func newTurns(t *testing.T) *turns { return &turns{T: t, dir: testenv.Dir(t)} }

const turnsLapse = 10 * time.Second

// host opens a host with room for so many pieces in the root.
func (s *turns) host(id string, pieces int, change ...func(*Config)) *fixture {
	s.Helper()
	var f *fixture
	f = fellow(s.T, s.dir, id, pieces, append([]func(*Config){func(c *Config) {
		c.UpkeepEvery, c.ScanWait = time.Hour, time.Hour
		c.Roots[0].Poll, c.Roots[0].Lapse = time.Second, turnsLapse
		c.Roots[0].Scheduler = &Scheduler{Now: s.clock, Wait: func(step func()) { s.turn(f, step) }}
	}}, change...)...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hosts = append(s.hosts, f)
	return f
}

func (s *turns) clock() time.Duration { return time.Hour + s.now }

// turn lets every host but those that are paused make a step; own is that of the host that waits.
func (s *turns) turn(waiting *fixture, own func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now += time.Second
	for _, f := range s.hosts {
		if f != waiting && !slices.Contains(s.paused, f) {
			_ = f.store.Maintain(context.Background(), 0, Step)
		}
	}
	own()
}

// pass lets so many polls pass.
func (s *turns) pass(n int) {
	for range n {
		s.turn(nil, func() {})
	}
}

// pause keeps a host from its steps until the others have given it up and cleared its temporaries.
func (s *turns) pause(f *fixture) {
	s.paused = append(s.paused, f)
	s.pass(int(turnsLapse/time.Second) + 6)
}

// resume ends all pauses.
func (s *turns) resume() { s.paused = nil }

func (f *fixture) begin(n uint64) *Put {
	f.Helper()
	p, err := f.store.Put(f.Context(), f.request(n, 0, 0))
	must(f, err)
	return p
}

// within checks that the disk has no more than the capacity, and that the evictor reckons with all that it has.
func (s *turns) within() {
	s.Helper()
	on := onDisk(s, s.dir)
	if capacity := s.hosts[0].cfg.Roots[0].Capacity; on > capacity {
		s.Errorf("%d bytes on disk, of %d", on, capacity)
	}
	for _, f := range s.hosts {
		st := f.store.Stats().Roots[0]
		if st.Shared.Evictor && st.Used < on {
			s.Errorf("the evictor %s reckons with %d bytes, %d are on disk", f.cfg.HostID, st.Used, on)
		}
	}
}

// TestCreditEndsWithItsIncarnation: a put is paused before it has a file, or while it writes one, and its host has
// joined again when it goes on. It may not write: its credit was given to others.
func TestCreditEndsWithItsIncarnation(t *testing.T) {
	for _, when := range []string{"before it has a file", "while it writes", "before it publishes"} {
		t.Run(when, func(t *testing.T) {
			s := newTurns(t)
			a, b := s.host("a", 24), s.host("b", 24)
			b.mustPut(0, 1)
			s.pass(3)
			var late []*Put
			for n := uint64(100); n < 104; n++ {
				p := b.begin(n)
				late = append(late, p)
				switch when {
				case "while it writes":
					if _, err := p.File(); err != nil {
						t.Fatal(err)
					}
				case "before it publishes":
					a.must(write(p))
				}
			}
			s.pause(b)
			for n := uint64(200); n < 240; n++ { // a has what b's credit was for
				if err := a.put(n, 0); err != nil && !errors.Is(err, ErrNoSpace) {
					t.Fatal(err)
				}
			}
			s.resume()
			s.pass(6)
			equal(t, "state of the host that has joined again", b.fellowStats().State, shared.Active)
			for _, p := range late {
				err := write(p)
				if err == nil {
					err = p.Publish(t.Context())
				}
				if !errors.Is(err, shared.ErrFenced) {
					t.Errorf("a put with credit of an earlier incarnation: %v, want %v", err, shared.ErrFenced)
				}
				s.within()
				p.Abort(err)
			}
			if left := temporaries(s.dir, "b"); len(left) != 0 {
				t.Errorf("temporaries are left: %v", left)
			}
			s.pass(6)
			s.within()
			equal(t, "credit held by earlier incarnations", b.fellowStats().Held, 0)
			await(t, "it stores again", func() bool { return b.put(300, 0) == nil })
		})
	}
}

// TestHeldCreditIsCounted: what puts of an earlier incarnation may still have in open files is not granted to anybody
// while they go on.
func TestHeldCreditIsCounted(t *testing.T) {
	s := newTurns(t)
	a, b := s.host("a", 24), s.host("b", 24)
	s.pass(3)
	p := b.begin(100)
	if _, err := p.File(); err != nil {
		t.Fatal(err)
	}
	s.pause(b)
	s.resume()
	s.pass(4)
	equal(t, "held by b", b.fellowStats().Held, pieceBytes)
	if out, least := a.fellowStats().Outside, a.fellowStats().Free+b.fellowStats().Free+pieceBytes; out < least {
		t.Errorf("the evictor counts %d bytes outside; what is free and what b holds make %d", out, least)
	}
	p.Abort(context.Canceled)
	s.pass(2)
	equal(t, "held by b when the put has ended", b.fellowStats().Held, 0)
}

// TestTemporariesOfAPausedHostAreEmptied: their names go, and so do the bytes of those that it has open.
func TestTemporariesOfAPausedHostAreEmptied(t *testing.T) {
	s := newTurns(t)
	s.host("a", 24)
	b := s.host("b", 24)
	s.pass(3)
	p := b.begin(100)
	b.must(write(p))
	defer p.Abort(context.Canceled)
	s.pause(b)
	info, err := p.file.Stat()
	b.must(err)
	if info.Allocated != 0 {
		t.Errorf("a temporary of a host that was given up takes %d bytes", info.Allocated)
	}
	if left := temporaries(s.dir, "b"); len(left) != 0 {
		t.Errorf("it still has a name: %v", left)
	}
}

// TestARejoinForgets: what a host knew before it was given up it neither grants nor loads, also where the files are
// still there; after the scan it has what there is.
func TestARejoinForgets(t *testing.T) {
	s := newTurns(t)
	a, b := s.host("a", 24), s.host("b", 24)
	b.mustPut(0, 1, 2, 3)
	s.pass(3)
	lease := b.lookup(0, 1)
	equal(t, "hits before", lease.Hits(), 2)
	s.pause(b)
	for n := uint64(200); n < 260; n++ { // which evicts all that b has
		if err := a.put(n, 0); err != nil && !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(b.pieceFile(2, 0)); err == nil {
		t.Fatal("the pieces were not evicted")
	}
	s.resume()
	for range 12 {
		s.pass(1)
		for n := range uint64(4) {
			if b.has(n) {
				t.Fatalf("key %d was evicted, and is a hit of a host that has joined again", n)
			}
		}
	}
	if _, err := lease.Open(0, 0); !errors.Is(err, ErrGone) {
		t.Errorf("a lease of an earlier incarnation: %v, want %v", err, ErrGone)
	}
	lease.Release()
	there := 0
	for n := uint64(200); n < 260; n++ {
		if _, err := os.Stat(a.pieceFile(n, 0)); err == nil {
			there++
			if !b.has(n) {
				t.Errorf("key %d is there, and a miss", n)
			}
		}
	}
	if there == 0 {
		t.Fatal("nothing is there")
	}
	b.must(b.check())
	equal(t, "bytes that b counts", b.store.Stats().Roots[0].Used, onDisk(t, s.dir))
}

// TestASharedPublicationInDoubt: nobody can tell whether a link was made. Its bytes stay covered by credit until a step
// finds out; then all hosts know the piece, or the temporary is gone and the credit is free.
func TestASharedPublicationInDoubt(t *testing.T) {
	for rule, made := range map[string]bool{"link **/t/*: eio after": true, "link **/t/* 1st: eio": false} {
		t.Run(rule, func(t *testing.T) {
			s := newTurns(t)
			a, faulty := s.host("a", 24), faultfs.New(staging.OS())
			b := s.host("b", 24, func(c *Config) { c.FS = faulty })
			b.mustPut(0)
			s.pass(3)
			p := b.begin(1)
			b.must(write(p))
			faulty.Set(faultfs.MustRules(rule + "\nstat **/t/* 2nd-: eio\nstat **_r?.kv: eio")...)
			if err := p.Publish(t.Context()); !errors.Is(err, shared.ErrDoubt) {
				t.Fatalf("publishing: %v, want %v", err, shared.ErrDoubt)
			}
			had := b.fellowStats()
			s.pass(2)
			if st := b.fellowStats(); st.Free-st.Granted > had.Free-had.Granted {
				t.Errorf("free credit while a piece is in doubt: %+v, before %+v", st, had)
			}
			if b.has(1) || a.has(1) {
				t.Error("a piece is a hit while it is in doubt")
			}
			if st := a.store.Stats().Roots[0]; st.Used+st.Shared.Outside < onDisk(t, s.dir) {
				t.Errorf("the evictor reckons with %d bytes and %d outside, %d are on disk", st.Used, st.Shared.Outside,
					onDisk(t, s.dir))
			}
			faulty.Set()
			s.pass(3)
			equal(t, "a hit of the host that wrote it", b.has(1), made)
			equal(t, "a hit of the other", a.has(1), made)
			if left := temporaries(s.dir, "b"); len(left) != 0 {
				t.Errorf("temporaries are left: %v", left)
			}
			for _, f := range s.hosts {
				equal(t, f.cfg.HostID+" counts", f.store.Stats().Roots[0].Used, onDisk(t, s.dir))
				f.must(f.check())
			}
			if !made {
				b.mustPut(1)
			}
			b.mustRead(1)
		})
	}
}

// TestAPieceIsPublishedWhileItIsWritten: a host learns of a piece that it is writing itself, and its own put comes to
// nothing. It must know the piece all the same, as it may be the evictor.
func TestAPieceIsPublishedWhileItIsWritten(t *testing.T) {
	s := newTurns(t)
	a, b := s.host("a", 24), s.host("b", 24)
	equal(t, "a is the evictor", a.fellowStats().Evictor, true)
	p := a.begin(1)
	b.mustPut(1)
	s.pass(2)
	s.within()
	p.Abort(context.Canceled)
	s.pass(1)
	s.within()
	equal(t, "a hit", a.has(1), true)
	equal(t, "bytes that the evictor counts", a.store.Stats().Roots[0].Used, pieceBytes)
	a.must(a.check())
}

// reckons is what the evictor takes for the bytes of pieces on disk.
func (f *fixture) reckons() int64 {
	r := f.root()
	r.Lock()
	defer r.Unlock()
	return r.Account.Figures().Used - r.owner.(*joint).inFlight
}

// TestAScanMeetsAPieceThatIsWritten: the evictor scans, as after a log that it has missed, and meets a piece of another
// host that it is writing itself. It counts the piece, also when its own put comes to nothing.
func TestAScanMeetsAPieceThatIsWritten(t *testing.T) {
	for _, ends := range []string{"is aborted", "is published"} {
		t.Run("the put "+ends, func(t *testing.T) {
			s := newTurns(t)
			a, b := s.host("a", 24), s.host("b", 24)
			equal(t, "a is the evictor", a.fellowStats().Evictor, true)
			p := a.begin(1)
			b.mustPut(1)
			a.must(a.shared().rescan(t.Context()))
			if got := a.reckons(); got < pieceBytes {
				t.Errorf("the evictor reckons with %d bytes, %d are on disk", got, pieceBytes)
			}
			s.pass(2)
			s.within()
			if ends == "is published" {
				a.must(write(p))
				a.must(p.Publish(t.Context()))
			}
			p.Abort(context.Canceled)
			s.pass(2)
			equal(t, "a hit", a.has(1), true)
			equal(t, "bytes that the evictor counts", a.reckons(), pieceBytes)
			a.must(a.check())
		})
	}
}

// TestAScanMeetsVictims: a host joins while victims are in the journal, and becomes the evictor before they are decided.
// They are on disk until then, and it grants nobody their bytes.
func TestAScanMeetsVictims(t *testing.T) {
	s := newTurns(t)
	a, c := s.host("a", 24), s.host("c", 24)
	for n := range uint64(16) {
		a.mustPut(n)
	}
	s.pass(3)
	s.paused = []*fixture{c} // the batch waits for its acknowledgement
	for n := range uint64(6) {
		a.drop(n)
	}
	s.pass(2)
	b := s.host("b", 24)
	s.paused = []*fixture{c, a}
	for range 3 * turnsLapse / time.Second {
		s.pass(1)
		st := b.store.Stats().Roots[0]
		if on := onDisk(t, s.dir); st.Shared.State == shared.Active && b.reckons() < on {
			t.Fatalf("b reckons with %d bytes, %d are on disk", b.reckons(), on)
		}
	}
	equal(t, "b is the evictor", b.fellowStats().Evictor, true)
	s.resume()
	s.pass(12)
	equal(t, "bytes that b counts", b.reckons(), onDisk(t, s.dir))
	equal(t, "bytes on disk", onDisk(t, s.dir), 10*pieceBytes)
}
