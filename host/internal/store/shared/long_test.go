package shared

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
)

// longStatus is the content of a status that vetoes victims until it has about the given number of bytes.
func longStatus(t *testing.T, bytes int) []byte {
	t.Helper()
	s := objectStatus{status: status{Beat: 1, Vetoes: map[uint64][]uint16{}}}
	for n := range uint64(64) {
		s.Vetoes[n] = make([]uint16, bytes/2/64)
	}
	b, err := EncodeControl(&s)
	testenv.OK(t, err)
	return b
}

// allocates is how many bytes are allocated meanwhile.
func allocates(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestLongStatuses: a status that is longer than any is not read. That of a host that vetoes all it can is.
func TestLongStatuses(t *testing.T) {
	for bytes, heeded := range map[int]bool{2 * maxBatch * mostBatches: true, 63 << 20: false} {
		t.Run(fmt.Sprint("directory, ", bytes), func(t *testing.T) {
			byHand(t, func(s *hands) {
				dir := "/r/" + Dir + "/hosts/long.1"
				s.dirs[dir] = true
				s.files[dir+"/status"] = &inode{ino: 1 << 40, links: 1, data: longStatus(t, bytes)}
				n := allocates(func() { s.round(s.a) })
				if is := s.a.peers["long.1"].Beat > 0; is != heeded || n > 8<<20 {
					t.Errorf("a status of %d bytes: it is heeded: %t, and a step has allocated %d bytes; want %t and at most 8 MiB", bytes, is, n, heeded)
				}
			})
		})
		t.Run(fmt.Sprint("bucket, ", bytes), func(t *testing.T) {
			m := newOnBucket(t, 2)
			defer m.end()
			m.run(6 * modelLapse)
			m.b.set(Dir+"/hosts/long.1", &object{data: longStatus(t, bytes)})
			n := allocates(func() { m.run(modelLapse) })
			for _, o := range m.nodes {
				if p := o.peers["long.1"]; p == nil || (p.Beat > 0) != heeded {
					t.Errorf("%s knows of a status of %d bytes: %+v, want that it is heeded: %t", o.name, bytes, p, heeded)
				}
			}
			if n > 32<<20 {
				t.Errorf("three hosts have allocated %d bytes for a status of %d bytes, want at most 32 MiB", n, bytes)
			}
		})
	}
	if most := mostStatus(3000) * 3000; most > 4*allStatuses {
		t.Errorf("the statuses of 3,000 members may have %d bytes, want about %d", most, allStatuses)
	}
}

// TestLogsInParts: what is logged at once is written in parts that others read. The names of temporaries go after the last, and a part
// whose write failed is written again as it was.
func TestLogsInParts(t *testing.T) {
	a := &attempt{temps: []string{"temp"}}
	for n := range 60_000 {
		r := Record{Op: Published, Bytes: 4096, Key: modelKey(n)}
		if n%1000 == 0 {
			for rank := range uint32(64) {
				r.Names = append(r.Names, pieceformat.Name{Rank: rank, Path: string(bytes.Repeat([]byte("x"), 200))})
			}
		}
		a.records = append(a.records, r)
	}
	parts, records := 0, a.records
	for len(a.records) > 0 {
		part := a.part()
		if last := len(part.records) == len(a.records); last != (part.temps != nil) {
			t.Errorf("part %d, which is the last: %t, has temporaries %v", parts, last, part.temps)
		}
		if again := a.part(); len(again.records) != len(part.records) {
			t.Errorf("part %d has %d records, and then %d", parts, len(part.records), len(again.records))
		}
		b := encodeLog(0, part.records)
		if _, got, err := decodeLog(b); err != nil || len(b) > mostLog || len(got) != len(part.records) {
			t.Errorf("part %d: %d bytes, %d of %d records, %v", parts, len(b), len(got), len(part.records), err)
		}
		records, parts = records[len(part.records):], parts+1
		a.records = a.records[len(part.records):]
	}
	if parts < 2 || len(records) != 0 {
		t.Errorf("%d parts, %d records left", parts, len(records))
	}
	byHand(t, func(s *hands) { // and through a member
		for range 60_000 {
			s.c.ReportDamaged(Record{Key: modelKey(46), Pieces: 1})
		}
		s.round(s.c)
		if s.c.retry != nil || len(s.c.outbox.records) > 0 {
			t.Errorf("%d records are not logged", len(s.c.outbox.records))
		}
	})
}

// manyLogs are the objects of a member with logs of that many records each.
type manyLogs struct {
	Objects
	records int
}

func (o manyLogs) Get(string, string, int64) ([]byte, string, error) {
	list := make([]Record, o.records)
	for n := range list {
		list[n] = Record{Op: Published, Bytes: 1, Key: modelKey(n)}
	}
	return encodeLog(0, list), "version", nil
}

// TestLogsAreNotKept: of many logs, few are in memory at once.
func TestLogsAreNotKept(t *testing.T) {
	const logs, records = 20 * logsInMemory, 1000
	m, err := New(Config{Objects: manyLogs{records: records}, Host: "a", Capacity: 1, Lapse: modelLapse, Unique: func() uint64 { return 1 },
		Now: func() time.Duration { return time.Hour }}, nil)
	testenv.OK(t, err)
	b := m.medium.(*bucket)
	m.name, m.peers, b.readings = "a.1", map[string]*peer{}, map[string]*reading{}
	m.peer("long.1")
	b.reading("long.1").Log = logs
	live := func() uint64 {
		var s runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	read, most, before := 0, uint64(0), live()
	_, err = b.follow(func(*Record) {
		if read++; read%(logsInMemory*records) == 0 {
			most = max(most, live())
		}
	})
	if err != nil || read != logs*records {
		t.Fatalf("%d records were read, want %d: %v", read, logs*records, err)
	}
	if has, one := most-min(most, before), uint64(records*unsafe.Sizeof(Record{})); has > 4*logsInMemory*one {
		t.Errorf("%d bytes are in memory while logs are read, %d times what one has", has, has/one)
	}
}

// TestLongBatches: a batch of more victims than an evictor proposes is damaged. A veto has no index for them.
func TestLongBatches(t *testing.T) {
	for victims, want := range map[int]error{maxBatch: nil, maxBatch + 1: ErrDamaged} {
		var b []byte
		for n := range victims {
			b = (&Record{Op: Published, Bytes: 1, Key: modelKey(n), Pieces: 1}).Append(b)
		}
		if _, err := decodeVictims(b); !errors.Is(err, want) {
			t.Errorf("a batch of %d victims: %v, want %v", victims, err, want)
		}
	}
}

// TestOpenBatches: the evictor proposes no victims while members have not applied as many batches as their statuses have room for.
func TestOpenBatches(t *testing.T) {
	byHand(t, func(s *hands) {
		term := s.a.term
		for n := range mostBatches {
			term.propose(&proposal{victims: []Victim{{Key: modelKey(100 + n)}}, since: time.Hour})
		}
		s.a.docket.forced[ID{Key: modelKey(46)}] = Victim{Key: modelKey(46), Pieces: 1}
		if term.evict(0); len(term.batches) != mostBatches {
			t.Errorf("%d batches are open, want %d", len(term.batches), mostBatches)
		}
		delete(term.batches, slices.Min(slices.Collect(maps.Keys(term.batches))))
		if term.evict(0); len(term.batches) != mostBatches {
			t.Errorf("%d batches are open when one was over, want another one", len(term.batches))
		}
	})
}

// TestMadeUpHosts: however many hosts someone makes up, no step of the evictor takes half a lapse, whatever is slow, and it forgets them all.
func TestMadeUpHosts(t *testing.T) {
	for slow, is := range map[string]func(op, name string) bool{
		"writing":   func(op, _ string) bool { return op == "rename" },
		"sweeping":  func(op, name string) bool { return op == "readdir" && path.Base(name) == "t" },
		"proposals": func(op, name string) bool { return op == "rename" && strings.Contains(name, "/journal/j") },
		"decisions": func(op, name string) bool { return op == "rename" && strings.Contains(name, "/journal/d") },
	} {
		t.Run(slow, func(t *testing.T) {
			byHand(t, func(s *hands) {
				const hosts = 120
				for n := range hosts {
					s.dirs[fmt.Sprintf("/r/%s/hosts/made%d.1", Dir, n)] = true
				}
				s.check = func(_ *scheduler.Thread, op string, names ...string) error {
					if is(op, names[0]) {
						s.Now += modelLapse / 100
					}
					return nil
				}
				steps := 0
				for made := hosts; made > 0; made = len(s.a.peers) - 3 {
					s.Now += modelPoll
					since := s.Now
					testenv.NoError(t, s.a.Step())
					if d := s.Now - since; d > modelLapse/2 {
						t.Errorf("step %d with %d made-up hosts has taken %s, want at most half of %s", steps, made, d, modelLapse)
					}
					for _, n := range []*node{s.b, s.c} {
						testenv.NoError(t, n.Step())
					}
					if steps++; steps > 150 || s.a.term == nil {
						t.Fatalf("after %d steps %d made-up hosts are left, and the evictor's term is %v", steps, made, s.a.term)
					}
				}
			})
		})
	}
}

// TestSlowFailures: a host that is gone and of which nothing can be removed, slowly, does not keep the evictor from another one.
func TestSlowFailures(t *testing.T) {
	byHand(t, func(s *hands) {
		for n := range 3 {
			s.dirs[fmt.Sprintf("/r/%s/hosts/made%d.1", Dir, n)] = true
		}
		temp := "/made0.1/t/temp"
		s.dirs["/r/"+Dir+"/hosts/made0.1/t"] = true
		s.files["/r/"+Dir+"/hosts"+temp] = &inode{ino: 1 << 40, links: 1}
		s.broken[s.a] = func(name string) error {
			if !strings.HasSuffix(name, temp) {
				return nil
			}
			s.Now += modelLapse / 8
			return syscall.EIO
		}
		for steps := 0; s.a.peers["made1.1"] != nil || s.a.peers["made2.1"] != nil || steps < 2; steps++ {
			if s.Now += modelPoll; steps > 150 {
				t.Fatalf("after %d steps, hosts are left after one that fails: %v", steps, slices.Sorted(maps.Keys(s.a.peers)))
			}
			for _, n := range []*node{s.a, s.b, s.c} {
				if err := n.Step(); err != nil && n != s.a { // the evictor's step fails by the one
					t.Fatalf("%s, step %d: %v", n.name, steps, err)
				}
			}
		}
		if s.a.peers["made0.1"] == nil {
			t.Error("the one that fails is forgotten")
		}
	})
}

// TestMadeUpWishes: grants to however many hosts that want some do not hold up a step either.
func TestMadeUpWishes(t *testing.T) {
	byHand(t, func(s *hands) {
		granted := 0
		s.check = func(_ *scheduler.Thread, op string, names ...string) error {
			if op == "rename" && strings.Contains(names[0], "/grants/made") {
				granted++
				s.Now += modelLapse / 100
			}
			return nil
		}
		for beat := range uint64(60) {
			status, err := EncodeControl(status{Beat: beat + 1, claim: claim{Want: mostBytes}})
			testenv.OK(t, err)
			for n := range 120 {
				dir := fmt.Sprintf("/r/%s/hosts/made%d.1", Dir, n)
				s.dirs[dir] = true
				s.files[dir+"/status"] = &inode{ino: 1<<40 + uint64(n), links: 1, data: status}
			}
			s.Now += modelPoll
			since := s.Now
			testenv.NoError(t, s.a.Step())
			if d := s.Now - since; d > modelLapse/2 {
				t.Errorf("step %d has taken %s, want at most half of %s", beat, d, modelLapse)
			}
		}
		if granted < 140 {
			t.Errorf("%d grants to 120 hosts that want more, want each one, and some more", granted)
		}
	})
}
