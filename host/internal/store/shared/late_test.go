package shared

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// hands are three hosts whose steps a test orders: a is the evictor.
type hands struct {
	*world
	t       *testing.T
	a, b, c *node
	broken  map[*node]func(name string) error // of opening or removing a file, and after a rename to a name
	boots   uint64
	damaged bool // temporaries that were published
}

// sweeper reads temporaries that were published, or none.
type sweeper struct {
	*node
	damaged *bool
}

func (b sweeper) Identify(name string, info staging.Info) (Record, error) {
	if *b.damaged {
		return Record{}, ErrDamaged
	}
	var num int
	fmt.Sscanf(path.Base(name), "%d", &num)
	return Record{Key: modelKey(num), Pieces: 1, Bytes: info.Allocated}, nil
}

type failingFS struct {
	hostFS
	s *hands
}

func (f failingFS) OpenFile(name string, flag int, perm os.FileMode) (staging.File, error) {
	if fail := f.s.broken[f.proc.(*node)]; fail != nil {
		if err := fail(name); err != nil {
			return nil, err
		}
	}
	return f.hostFS.OpenFile(name, flag, perm)
}

func (f failingFS) Remove(name string) error {
	if fail := f.s.broken[f.proc.(*node)]; fail != nil && fail(name) != nil {
		return fail(name)
	}
	return f.hostFS.Remove(name)
}

func (f failingFS) Rename(from, to string) error {
	err := f.hostFS.Rename(from, to)
	if fail := f.s.broken[f.proc.(*node)]; err == nil && fail != nil {
		err = fail(to)
	}
	return err
}

// byHand runs a test's history with hosts that have met.
func byHand(t *testing.T, history func(s *hands)) {
	t.Helper()
	s := &hands{world: newWorld(1), t: t, damaged: true, broken: map[*node]func(string) error{}}
	s.Start("test", nil, func(*scheduler.Thread) error {
		s.a, s.b, s.c = s.boot("a"), s.boot("b"), s.boot("c")
		for s.a.Stats().State != Active {
			s.round(s.a)
		}
		for s.b.Stats().State != Active || s.c.Stats().State != Active {
			s.round(s.a, s.b, s.c)
		}
		credit, ok := s.c.Take(3 * 4096)
		for ; !ok; credit, ok = s.c.Take(3 * 4096) {
			s.round(s.a, s.b, s.c)
		}
		s.c.Give(credit)
		if !s.a.Stats().Evictor {
			t.Error("the first host is not the evictor")
		}
		history(s)
		return nil
	})
	for s.Step() {
	}
	if s.fault != nil {
		t.Error(s.fault)
	}
}

func (s *hands) dir(n *node) *directory { return n.medium.(*directory) }

func (s *hands) boot(id string) *node {
	n := &node{s: s.Scheduler, place: s.world, index: map[kv.Key]*item{}}
	n.files = failingFS{hostFS{n, s.world}, s}
	s.boots++
	unique := s.boots << 32
	var err error
	n.Member, err = New(Config{
		Dir: "/r", Host: id, Capacity: modelCapacity, Lapse: modelLapse, FS: n.files,
		Unique: func() uint64 { unique++; return unique }, Now: func() time.Duration { return s.Now },
	}, sweeper{n, &s.damaged})
	testenv.NoError(s.t, err)
	return n
}

// round lets hosts make a step, one after the other. What a host would grant must be there.
func (s *hands) round(list ...*node) {
	s.Now += modelPoll
	for _, n := range list {
		_ = n.Step()
		if t := n.Ticket(); t != 0 && t != n.ticket {
			n.scan(t)
		}
		for k, i := range n.index {
			if s.promises(n) && i.grantable() && s.files[s.path(k)] == nil {
				s.t.Errorf("%s would grant %d, which is gone", n.name, k[0])
			}
		}
	}
}

func (s *hands) rounds(n int, list ...*node) {
	for range n {
		s.round(list...)
	}
}

// before calls do once, before an operation on a name that ends like this.
func (s *hands) before(op, suffix string, do func()) {
	s.check = func(_ *scheduler.Thread, is string, names ...string) error {
		if is == op && strings.HasSuffix(names[0], suffix) {
			s.check = nil
			do()
		}
		return nil
	}
}

// store has a host publish an entry that it has not logged yet.
func (s *hands) store(n *node, k kv.Key) {
	if err := n.put(k); err != nil || s.files[s.path(k)] == nil {
		s.t.Errorf("%s cannot store: %v", n.name, err)
	}
}

// condemn has the evictor propose an entry, which it need not know.
func (s *hands) condemn(k kv.Key) {
	s.a.ReportDamaged(Record{Key: k, Pieces: 1})
	s.round(s.a)
}

// until makes rounds until an entry is gone.
func (s *hands) until(k kv.Key, list ...*node) {
	for rounds := 0; s.files[s.path(k)] != nil; rounds++ {
		if s.round(list...); rounds > 100 {
			s.t.Fatal("the victim is not removed")
		}
	}
}

// TestVictimIsNotLearnedLate: no host takes a victim that was removed for one that is there, however late it hears that
// it was published.
func TestVictimIsNotLearnedLate(t *testing.T) {
	k := modelKey(46)
	t.Run("a log cannot be read for a while", func(t *testing.T) {
		byHand(t, func(s *hands) {
			s.store(s.c, k)
			s.round(s.c)
			s.condemn(k)
			s.broken[s.b] = func(name string) error {
				if strings.HasPrefix(name, s.dir(s.c).dir+"/log") {
					return pathErr("open", name, unix.ESTALE)
				}
				return nil
			}
			s.rounds(3, s.b, s.c, s.a)
			s.broken[s.b] = nil
			s.until(k, s.b, s.c, s.a)
			s.round(s.b, s.c, s.a)
		})
	})
	t.Run("its host was paused while it wrote the log", func(t *testing.T) {
		byHand(t, func(s *hands) {
			s.store(s.c, k)
			s.condemn(k)
			s.before("write", "/log.0", func() { s.until(k, s.a, s.b) })
			s.round(s.c) // ends with a write to a file that it had opened before it was given up
			s.round(s.b, s.a)
		})
	})
	t.Run("its host died before it wrote the log", func(t *testing.T) {
		byHand(t, func(s *hands) {
			s.damaged = false
			s.store(s.c, k)
			s.condemn(k)
			s.round(s.b)
			s.until(k, s.a, s.b)
			s.rounds(3, s.b, s.a)
		})
	})
	t.Run("its host died before it acknowledged", func(t *testing.T) {
		byHand(t, func(s *hands) {
			s.store(s.c, k)
			s.condemn(k)
			s.rounds(5, s.b, s.a) // c falls silent first
			s.before("readdir", "/journal", func() {
				s.broken[s.c] = func(name string) error {
					if strings.HasSuffix(name, "/status.new") {
						return pathErr("open", name, unix.EIO)
					}
					return nil
				}
				s.round(s.c)
				s.until(k, s.a)
			})
			s.round(s.b)
			s.round(s.b)
		})
	})
}

// TestTouchesReachTheOthers: each of them, once between two steps, and not the host itself.
func TestTouchesReachTheOthers(t *testing.T) {
	byHand(t, func(s *hands) {
		for range 2 {
			s.b.Touch(7)
			s.b.Touch(7)
			s.rounds(3, s.a, s.b, s.c)
		}
		for n, want := range map[*node][]uint64{s.a: {7, 7}, s.b: nil, s.c: {7, 7}} {
			if !slices.Equal(n.touched, want) {
				t.Errorf("%s has learned of touches of %d, want %d", n.name, n.touched, want)
			}
		}
		if s.dir(s.b).out.file != 0 {
			t.Errorf("the log has begun %d more files for one record, want none", s.dir(s.b).out.file)
		}
	})
}

// TestDecisionsAreInOrder: a batch is not decided before one that was proposed earlier.
func TestDecisionsAreInOrder(t *testing.T) {
	byHand(t, func(s *hands) {
		term := s.a.term
		first, second := term.propose(&proposal{forget: "first"}), term.propose(&proposal{forget: "second"})
		testenv.NoError(t, term.write())
		for _, p := range s.a.peers {
			p.Vetoes = map[uint64][]uint16{second: nil} // each has acknowledged this one alone
		}
		s.a.acknowledge(second, nil)
		testenv.NoError(t, term.decideAll())
		if term.batches[first].decided || term.batches[second].decided {
			t.Errorf("decided: %t and %t, want neither before the first is acknowledged", term.batches[first].decided,
				term.batches[second].decided)
		}
	})
}

// TestALifeThatEnded: the others do not wait for one of a host that began anew, nor for an evictor that has left.
func TestALifeThatEnded(t *testing.T) {
	byHand(t, func(s *hands) {
		if s.round(s.boot("c")); s.promises(s.c) {
			t.Errorf("%s is counted on after its host began anew, want it given up", s.c.name)
		}
		testenv.NoError(t, s.a.Leave())
		s.rounds(3, s.b)
		if !s.b.Stats().Evictor {
			t.Error("no host is the evictor three steps after it has left, want another one")
		}
	})
}

// TestALogIsReadBeforeItGoes: a host that has not read the log of one that left is waited for.
func TestALogIsReadBeforeItGoes(t *testing.T) {
	byHand(t, func(s *hands) {
		k := modelKey(46)
		s.store(s.c, k)
		testenv.NoError(t, s.c.Leave())
		s.rounds(5, s.a)
		if s.rounds(1, s.b); !s.b.index[k].grantable() {
			t.Errorf("%s knows nothing of %d, which one that left has stored", s.b.name, k[0])
		}
	})
}

// TestADecisionStands: one that is there although its write failed is not made again: the others have applied it, and
// acknowledge nothing more of its batch.
func TestADecisionStands(t *testing.T) {
	byHand(t, func(s *hands) {
		first, second := modelKey(46), modelKey(47)
		s.store(s.c, first)
		s.store(s.c, second)
		s.round(s.c)
		s.broken[s.a] = func(name string) error {
			if !strings.Contains(name, "/journal/d") || strings.HasSuffix(name, ".new") {
				return nil
			}
			s.round(s.b, s.c)
			s.broken[s.a] = nil
			return pathErr("rename", name, unix.EIO)
		}
		for _, k := range []kv.Key{first, second} {
			s.condemn(k)
			s.until(k, s.b, s.c, s.a)
		}
	})
}

// TestADeadLogIsReadToItsEnd: the evictor forgets what a host may write when it knows of all that the host has written.
func TestADeadLogIsReadToItsEnd(t *testing.T) {
	byHand(t, func(s *hands) {
		k, name := modelKey(46), s.c.name
		s.store(s.c, k)
		s.before("rename", "/hosts/"+name, func() { _ = s.c.Step() }) // it writes its log in the last moment
		for range 40 {
			s.round(s.b, s.a)
			if p := s.a.term.accounts[name]; (p == nil || p.swept) && s.a.index[k] == nil {
				t.Fatalf("the evictor counts on nothing more of %s, and has not read of %d", name, k[0])
			}
		}
		if s.a.Stats().GivenUp != 1 {
			t.Errorf("%d hosts were given up, want 1", s.a.Stats().GivenUp)
		}
	})
}

// TestALinkIsLate: a publication is found that happened after the first look at it.
func TestALinkIsLate(t *testing.T) {
	byHand(t, func(s *hands) {
		c := s.dir(s.c)
		d := doubt{temp: c.dir + "/t/late", target: "/r/p/late"}
		testenv.OK(t, c.put(d.temp, status{}))
		s.before("remove", d.temp, func() { testenv.NoError(t, s.c.files.Link(d.temp, d.target)) })
		if there, _, err := c.happened(&d); !there || err != nil {
			t.Errorf("a link that was made between two looks: found %t, error %v, want it", there, err)
		}
	})
}

// TestALogGoesOn: what is logged is written though an old file of the log could not be removed at once. A step that cannot
// write it says so. A reader that is far behind gets all.
func TestALogGoesOn(t *testing.T) {
	byHand(t, func(s *hands) {
		c := s.dir(s.c)
		w, list := writer{file: logKept - 1, size: 1}, []Record{{Op: Damaged, Key: modelKey(1), Names: []pieceformat.Name{{Path: "a"}}}}
		again := w
		s.store(s.c, modelKey(46))
		s.broken[s.c] = func(name string) error {
			if strings.HasPrefix(name, s.dir(s.c).dir+"/log.") {
				return pathErr("open", name, unix.EIO)
			}
			return nil
		}
		if err := s.c.Step(); !errors.Is(err, unix.EIO) {
			t.Errorf("a step without a log: error %v, want %v", err, unix.EIO)
		}
		if err := w.append(&c.tree, c.dir, 1, 0, list); !errors.Is(err, unix.EIO) || w != again {
			t.Errorf("with a file that stays: error %v and %+v, want %v and %+v", err, w, unix.EIO, again)
		}
		s.broken[s.c] = nil
		if err := w.append(&c.tree, c.dir, 1, 0, list); err != nil || s.files[logName(c.dir, logKept)] == nil {
			t.Errorf("tried again: error %v, log %+v, want the next file", err, w)
		}
		const many = 3*1024 + 7
		count := 0
		testenv.NoError(t, (&writer{}).append(&c.tree, "/r/p", logFull, 0, slices.Repeat(list, many)))
		if err := (&tail{}).follow(&c.tree, "/r/p", func(*Record) { count++ }); err != nil || count != many {
			t.Errorf("%d records are read, error %v, want %d", count, err, many)
		}
	})
}

// TestLongWorkIsNoSilence: an evictor that takes longer than the lapse to remove a batch stays the evictor.
func TestLongWorkIsNoSilence(t *testing.T) {
	byHand(t, func(s *hands) {
		for n := range 4 * int(modelLapse/modelPoll) {
			s.a.ReportDamaged(Record{Key: modelKey(n), Pieces: 1})
		}
		removed := 0
		s.check = func(_ *scheduler.Thread, op string, names ...string) error {
			if op == "rename" && strings.HasPrefix(names[0], "/r/p/") && s.b.term == nil {
				removed++
				s.Now += modelPoll
				_ = s.b.Step()
			}
			return nil
		}
		for rounds := 0; removed < 20 && rounds < 40; rounds++ {
			s.round(s.a, s.b, s.c)
		}
		if !s.a.Stats().Evictor || removed < 20 {
			t.Errorf("after %d removals of %s each the evictor is one: %t, want it to be", removed, modelPoll, s.a.Stats().Evictor)
		}
	})
}

// TestGrants: what hosts want is granted in one step, and written once.
func TestGrants(t *testing.T) {
	byHand(t, func(s *hands) {
		for _, n := range []*node{s.b, s.c} {
			n.Take(20 * 4096) // more than it has
		}
		s.rounds(1, s.b, s.c)
		written := 0
		s.broken[s.a] = func(name string) error {
			if strings.HasSuffix(name, "/grants/"+s.b.name) || strings.HasSuffix(name, "/grants/"+s.c.name) {
				written++
			}
			return nil
		}
		s.rounds(1, s.a)
		first := written
		if s.rounds(3, s.a); first != 2 || written != 2 {
			t.Errorf("%d grants of two hosts are written in a step, and %d in four, want 2", first, written)
		}
		more := s.b.More()
		s.rounds(1, s.b)
		select {
		case <-more:
		default:
			t.Error("no signal when credit came, want one for the puts that wait")
		}
	})
}

// TestAVictimThatIsNotRemovedIsNotDecided: while it lies in the trash, what it takes is not given to another.
func TestAVictimThatIsNotRemovedIsNotDecided(t *testing.T) {
	byHand(t, func(s *hands) {
		k, trash := modelKey(46), ""
		s.store(s.c, k)
		s.rounds(2, s.c, s.b)
		s.broken[s.a] = func(name string) error {
			if strings.Contains(name, "/trash/") {
				trash = name
				return pathErr("remove", name, unix.EIO)
			}
			return nil
		}
		s.condemn(k)
		s.until(k, s.b, s.c, s.a)
		if s.rounds(5, s.b, s.c, s.a); s.files[trash] == nil || s.b.index[k] == nil {
			t.Errorf("file in the trash %t, entry known %t, want both until the file can be removed", s.files[trash] != nil,
				s.b.index[k] != nil)
		}
		s.broken[s.a] = nil
		if s.rounds(5, s.b, s.c, s.a); s.files[trash] != nil || s.b.index[k] != nil {
			t.Errorf("file in the trash %t, entry known %t, want neither", s.files[trash] != nil, s.b.index[k] != nil)
		}
	})
}

// TestNumbersOfNoEpoch: a directory with a number that no election gives does not end the evictor's work, nor keep another from it.
func TestNumbersOfNoEpoch(t *testing.T) {
	for _, name := range []string{"/e18446744073709551615", "/x18446744073709551615.z", "/e4294967296", "/e99999999999999999999"} {
		byHand(t, func(s *hands) {
			s.dirs["/r/"+Dir+name] = true
			s.rounds(3, s.a, s.b, s.c)
			if !s.a.Stats().Evictor {
				t.Errorf("%s: the evictor is one no more", name)
			}
			s.rounds(4*int(modelLapse/modelPoll), s.b, s.c) // without it
			if !s.b.Stats().Evictor && !s.c.Stats().Evictor {
				t.Errorf("%s: no other host is elected", name)
			}
		})
	}
}

// TestTheLastEpoch: if a directory has the last number, no host is elected, since no other would know. Once it is removed, one is.
func TestTheLastEpoch(t *testing.T) {
	for _, name := range []string{"/e2147483647", "/x2147483647.made.1"} {
		byHand(t, func(s *hands) {
			evictors := func() (n int) {
				for _, x := range []*node{s.a, s.b, s.c} {
					if x.Stats().Evictor {
						n++
					}
				}
				return n
			}
			dir := "/r/" + Dir + name
			s.dirs[dir] = true
			testenv.NoError(t, s.a.Leave())
			for range 4 * int(modelLapse/modelPoll) {
				if s.round(s.b, s.c); evictors() > 0 {
					t.Fatalf("%s: %d hosts are the evictor with the last epoch, want none", name, evictors())
				}
			}
			delete(s.dirs, dir)
			if s.rounds(4*int(modelLapse/modelPoll), s.b, s.c); evictors() != 1 {
				t.Errorf("%s: %d hosts are the evictor after it was removed, want one", name, evictors())
			}
		})
	}
}

// TestAJournalIsTakenOverWhole: an error that does not prove that a batch is gone does not lose it.
func TestAJournalIsTakenOverWhole(t *testing.T) {
	byHand(t, func(s *hands) {
		k := modelKey(46)
		s.store(s.c, k)
		s.rounds(2, s.c, s.b, s.a)
		s.condemn(k)
		s.round(s.c)
		testenv.NoError(t, s.a.Leave())
		failed := false
		s.broken[s.c] = func(name string) error {
			if failed || !strings.Contains(name, "/x") || !strings.Contains(name, "/journal/j") {
				return nil
			}
			failed = true
			return pathErr("open", name, unix.ESTALE)
		}
		if s.until(k, s.c, s.b); !failed || !s.c.Stats().Evictor {
			t.Errorf("reading of the journal failed: %t, the evictor is %s: %t", failed, s.c.name, s.c.Stats().Evictor)
		}
	})
}

// TestABatchThatCannotBeRead ends with its victims spared, and they can be proposed again.
func TestABatchThatCannotBeRead(t *testing.T) {
	byHand(t, func(s *hands) {
		k := modelKey(46)
		s.store(s.c, k)
		s.rounds(3, s.c, s.b, s.a)
		s.condemn(k)
		for name, f := range s.files {
			if strings.Contains(name, "/journal/j") {
				f.data = []byte("damaged")
			}
		}
		s.rounds((unreadLapses+1)*int(modelLapse/modelPoll), s.b, s.c, s.a)
		if !s.b.index[k].grantable() {
			t.Errorf("%d is not granted after the batch ended", k[0])
		}
		s.condemn(k)
		s.until(k, s.b, s.c, s.a)
	})
}

// TestAClaimOfNonsense: a member that goes on telling what none can have is given up, and costs the others no credit.
func TestAClaimOfNonsense(t *testing.T) {
	for _, claim := range []claim{{Held: math.MaxInt64}, {Want: -1}, {Returned: math.MaxInt64}, {Free: math.MinInt64}} {
		byHand(t, func(s *hands) {
			const member = "/z.1"
			dir := "/r/" + Dir + "/hosts"
			s.dirs[dir+member] = true
			for n := range 2 * int(modelLapse/modelPoll) {
				b, err := EncodeControl(&status{Beat: uint64(n + 1), claim: claim})
				testenv.NoError(t, err)
				if s.dirs[dir+member] {
					s.inos++
					s.files[dir+member+"/status"] = &inode{ino: s.inos, links: 1, data: b}
				}
				s.rounds(1, s.a, s.b, s.c)
			}
			if s.dirs[dir+member] || s.a.Stats().GivenUp != 1 {
				t.Errorf("%+v: a member that tells this is there, want it given up", claim)
			}
			if free := s.c.Stats().Free; free <= 0 || free > modelCapacity {
				t.Errorf("%+v: another has credit of %d bytes", claim, free)
			}
		})
	}
}

// TestAGrantOfNonsense: a grant that no evictor makes is none, to its member and to the next evictor.
func TestAGrantOfNonsense(t *testing.T) {
	for _, granted := range []int64{math.MaxInt64, -1} {
		byHand(t, func(s *hands) {
			b, err := EncodeControl(&grantFile{granted})
			testenv.NoError(t, err)
			for _, member := range []string{s.b.name, "made.1"} {
				s.files[grantName(s.dir(s.a).office(), member)] = &inode{ino: 1 << 40, links: 1, data: b}
			}
			if s.rounds(2, s.b, s.c); s.b.Stats().Granted > modelCapacity {
				t.Errorf("a grant of %d: its member has %d bytes", granted, s.b.Stats().Granted)
			}
			testenv.NoError(t, s.a.Leave())
			s.rounds(6*int(modelLapse/modelPoll), s.b, s.c)
			for _, n := range []*node{s.b, s.c} {
				if st := n.Stats(); st.State != Active || st.Outside < 0 || st.Outside > modelCapacity || st.Granted > modelCapacity {
					t.Errorf("a grant of %d: %s is %+v, want it active, with as much granted as there is", granted, n.name, st)
				}
			}
			if s.b.Stats().Evictor == s.c.Stats().Evictor {
				t.Error("no host is the evictor, or two are")
			}
		})
	}
}

// TestAJoinThatFailsIsReported, and made again.
func TestAJoinThatFailsIsReported(t *testing.T) {
	byHand(t, func(s *hands) {
		d := s.boot("d")
		s.broken[d] = func(name string) error { return pathErr("open", name, unix.EIO) }
		if err := d.Step(); !errors.Is(err, unix.EIO) {
			t.Errorf("a step that cannot join: error %v, want %v", err, unix.EIO)
		}
		s.broken[d] = nil
		if s.rounds(10, d, s.a, s.b, s.c); d.Stats().State != Active {
			t.Errorf("state %v after ten rounds, want %v", d.Stats().State, Active)
		}
	})
}
