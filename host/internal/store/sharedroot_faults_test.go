package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// settled waits until all hosts' accounts are what is on the disk.
func settled(t *testing.T, dir string, hosts ...*fixture) {
	t.Helper()
	await(t, "the accounts are the disk's", func() bool {
		on := onDisk(t, dir)
		for _, f := range hosts {
			if f.store.Stats().Roots[0].Used != on {
				return false
			}
		}
		return true
	})
}

// TestARankIsTriedAgain: the put of one rank of a shared entry comes to nothing while the other's stays. Who tries
// again takes credit again, and others learn of the piece.
func TestARankIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	a, b := fellowOf(t, dir, "a", 60, 2, patient), fellowOf(t, dir, "b", 60, 2, patient)
	must(t, a.put(1, 0))
	for range 3 {
		p, err := a.store.Put(t.Context(), a.request(1, 0, 1))
		must(t, err)
		p.Abort(context.Canceled)
	}
	if used := a.store.Stats().Roots[0].Used; used != pieceBytes {
		t.Errorf("%d bytes are accounted for one piece of %d", used, int64(pieceBytes))
	}
	must(t, a.put(1, 1))
	await(t, "b knows both pieces", func() bool { return b.has(1) })
	await(t, "temporaries' names are gone", func() bool { return len(temporaries(dir, "a")) == 0 })
	settled(t, dir, a, b)
}

// TestATemporaryThatStays: its credit is not given back before it goes, so that all hosts together stay within the
// capacity; the name of one that was published goes later too.
func TestATemporaryThatStays(t *testing.T) {
	dir := t.TempDir()
	faulty := faultfs.New(staging.OS())
	a := fellow(t, dir, "a", 60, func(c *Config) {
		c.FS, c.UpkeepEvery = faulty, time.Hour
	}, patient)
	b := fellow(t, dir, "b", 60, patient)
	a.mustPut(0)
	settled(t, dir, a, b)
	faulty.Set(faultfs.MustRules("remove **/t/*: eio")...)
	a.mustPut(2)
	await(t, "b knows what was published", func() bool { return b.has(2) })
	faulty.Set()
	settled(t, dir, a, b)
	await(t, "its other name is gone", func() bool { return len(temporaries(dir, "a")) == 0 })

	c := a.shared()
	c.silence() // what is free changes by its puts alone from now on
	faulty.Set(faultfs.MustRules("remove **/t/*: eio")...)
	free := a.fellowStats().Free
	p, err := a.store.Put(t.Context(), a.request(1, 0, 0))
	must(t, err)
	must(t, write(p))
	p.Abort(context.Canceled)
	if now := a.fellowStats().Free; now != free-pieceBytes || len(temporaries(dir, "a")) != 1 {
		t.Errorf("%d bytes of credit are free, %d before, and %d temporaries are there", now, free,
			len(temporaries(dir, "a")))
	}
	faulty.Set()
	a.maintain(RetryRemovals)
	if now := a.fellowStats().Free; now != free || len(temporaries(dir, "a")) != 0 {
		t.Errorf("%d bytes of credit are free, %d before, and %d temporaries are there", now, free,
			len(temporaries(dir, "a")))
	}
}

func temporaries(dir, host string) []string {
	left, _ := filepath.Glob(filepath.Join(dir, shared.Dir, "hosts", host+".*", "t", "*"))
	return left
}

// TestTornControlFiles: a loss of power leaves the evictor's files empty. The hosts that come after it store all the
// same.
func TestTornControlFiles(t *testing.T) {
	t.Parallel() // it waits more than it works
	for _, kind := range []string{"grants/*", "journal/j*", "journal/d*"} {
		t.Run(strings.Trim(kind, "/*"), func(t *testing.T) {
			dir := t.TempDir()
			a := fellow(t, dir, "a", 12)
			for n := range uint64(30) {
				await(t, "it is stored", func() bool { err := a.put(n, 0); return err == nil || errors.Is(err, ErrResident) })
			}
			c := a.shared()
			c.silence() // its heart stands still
			list, _ := filepath.Glob(filepath.Join(dir, shared.Dir, "e*", kind))
			if kind == "grants/*" && len(list) == 0 {
				t.Fatal("no grants")
			}
			for _, name := range list {
				must(t, os.Truncate(name, 0))
			}
			if len(list) == 0 { // none was under way just then
				epochs, _ := filepath.Glob(filepath.Join(dir, shared.Dir, "e*", "journal"))
				put(t, filepath.Join(epochs[0], strings.TrimSuffix(filepath.Base(kind), "*")+"77"), nil)
			}
			b := fellow(t, dir, "b", 12)
			for n := uint64(100); n < 120; n++ {
				await(t, "it is stored", func() bool { err := b.put(n, 0); return err == nil || errors.Is(err, ErrResident) })
			}
			settled(t, dir, b)
			if used := onDisk(t, dir); used > b.cfg.Roots[0].Capacity {
				t.Errorf("%d bytes on the disk, capacity %d", used, b.cfg.Roots[0].Capacity)
			}
		})
	}
}

// TestAFailedProposal: an entry is damaged, and the journal cannot be written for a while.
func TestAFailedProposal(t *testing.T) {
	dir := t.TempDir()
	faulty := faultfs.New(staging.OS())
	a := fellow(t, dir, "a", 60, func(c *Config) { c.FS = faulty })
	a.mustPut(0, 1)
	name := a.pieceFile(1, 0)
	image, err := os.ReadFile(name)
	must(t, err)
	image[3*pieceformat.Page] ^= 1
	put(t, name, image)
	faulty.Set(faultfs.MustRules("write **/journal/*: eio")...)
	l := a.lookup(1)
	if _, err := read(l, 0, 0); err == nil {
		t.Error("a damaged piece was read")
	}
	l.Release()
	await(t, "the journal cannot be written", func() bool { return faulty.Injected() > 2 })
	faulty.Set()
	await(t, "it can be stored again", func() bool { return a.put(1, 0) == nil })
	a.mustRead(1)
	settled(t, dir, a)
}

// TestAVictimHasNoOtherName: a host is paused while it removes the temporary of a piece that the evictor knows already,
// because its own put of the piece met it. The evictor grants the piece's room only when the temporary has gone too.
func TestAVictimHasNoOtherName(t *testing.T) {
	s := newTurns(t)
	a, faulty := s.host("a", 24), faultfs.New(staging.OS())
	b := s.host("b", 24, func(c *Config) { c.FS = faulty })
	s.pass(3)
	equal(t, "a is the evictor", a.fellowStats().Evictor, true)
	met := a.begin(1)
	b.mustPut(1)
	a.must(write(met))
	a.must(met.Publish(t.Context())) // it is b's
	a.drop(1)
	s.paused = []*fixture{b}
	s.pass(2) // b has yet to acknowledge
	faulty.Set(faultfs.MustRules("remove **/t/* 1st: hang")...)
	ctx, stepped := context.WithCancel(t.Context())
	go func() {
		defer stepped()
		_ = b.store.Maintain(ctx, 0, Step)
	}()
	b.must(faulty.AwaitHanging(ctx, 1))
	for range 3 {
		s.pass(1)
		s.within()
	}
	faulty.Set()
	<-ctx.Done()
	s.resume()
	s.pass(6)
	s.within()
	equal(t, "bytes on disk", onDisk(t, s.dir), 0)
}

// TestAPublishedTemporaryIsDamaged: a host is given up between the link of a piece and its log, and the piece's header is
// damaged, so that whoever clears its temporaries cannot tell the others what it is. No later evictor reckons with less
// than is on the disk.
func TestAPublishedTemporaryIsDamaged(t *testing.T) {
	for name, rules := range map[string]string{"": "", " and cannot be emptied at first": "open **/gone/*/t/* 2nd: eio"} {
		t.Run("damaged"+name, func(t *testing.T) {
			s := newTurns(t)
			faulty := faultfs.New(staging.OS())
			a := s.host("a", 24, func(c *Config) { c.FS = faulty })
			b, c := s.host("b", 24), s.host("c", 24)
			b.mustPut(0)
			s.pass(4)
			equal(t, "a is the evictor", a.fellowStats().Evictor, true)
			c.mustPut(1)
			file := c.pieceFile(1, 0)
			image, err := os.ReadFile(file)
			c.must(err)
			image[0] ^= 1
			put(t, file, image)
			faulty.Set(faultfs.MustRules(rules)...)
			s.pause(c)
			if rules != "" {
				equal(t, "faults", faulty.Injected(), 1)
			}
			if left, _ := filepath.Glob(filepath.Join(s.dir, shared.Dir, "gone", "*", "t", "*")); len(left) != 0 {
				t.Errorf("temporaries are left: %v", left)
			}
			s.within()
			s.pause(a)
			equal(t, "b is the evictor", b.fellowStats().Evictor, true)
			s.within()
			if err := b.put(1, 0); err == nil {
				t.Fatal("it is stored over a damaged file")
			}
			s.pass(int(turnsLapse/time.Second) + 6) // a has been given up, and the file's name is free again
			b.mustPut(1)
			b.mustRead(1)
			s.resume()
			s.pass(6)
			s.within()
			equal(t, "bytes that b counts", b.reckons(), onDisk(t, s.dir))
		})
	}
}

// TestAStaleHandleOfTheHosts: the evictor's handle of the hosts' directory is stale once. It does not take them for gone:
// they would never acknowledge that, nor what is proposed after it.
func TestAStaleHandleOfTheHosts(t *testing.T) {
	s := newTurns(t)
	faulty := faultfs.New(staging.OS())
	a := s.host("a", 24, func(c *Config) { c.FS = faulty })
	b := s.host("b", 24)
	s.pass(3)
	equal(t, "a is the evictor", a.fellowStats().Evictor, true)
	// A step lists them to follow their logs, and again to read what they say.
	faulty.Set(faultfs.MustRules("readdir **/shared/hosts 2nd: estale")...)
	s.pass(6)
	equal(t, "faults", faulty.Injected(), 1)
	if out, free := a.fellowStats().Outside, a.fellowStats().Free+b.fellowStats().Free; out < free {
		t.Errorf("the evictor counts %d bytes of credit, the hosts have %d", out, free)
	}
	for n := range uint64(60) {
		if err := b.put(n, 0); err != nil && !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
		s.pass(3)
		s.within()
	}
	s.pass(6)
	for _, f := range s.hosts {
		f.must(f.idle())
	}
}

// TestOddThingsAmongHosts: what no host makes, under the names of hosts and of their files, does not keep the hosts from storing, and is
// not followed.
func TestOddThingsAmongHosts(t *testing.T) {
	for what, plant := range map[string]func(hosts, host string) error{
		"a pipe as status":        func(_, host string) error { return unix.Mkfifo(host+"/status", 0o600) },
		"a pipe as a log":         func(_, host string) error { return unix.Mkfifo(host+"/log.0", 0o600) },
		"a link as status":        func(_, host string) error { return os.Symlink("/dev/zero", host+"/status") },
		"a link as a log":         func(_, host string) error { return os.Symlink("/dev/zero", host+"/log.0") },
		"a link to itself":        func(_, host string) error { return os.Symlink("status", host+"/status") },
		"a directory as status":   func(_, host string) error { return os.Mkdir(host+"/status", 0o700) },
		"a directory as a log":    func(_, host string) error { return os.Mkdir(host+"/log.0", 0o700) },
		"a log of nonsense":       func(_, host string) error { return os.WriteFile(host+"/log.0", make([]byte, 1<<16), 0o600) },
		"a file as a host":        func(hosts, _ string) error { return os.WriteFile(hosts+"/file.1", nil, 0o600) },
		"a link as a host":        func(hosts, _ string) error { return os.Symlink("/etc", hosts+"/link.1") },
		"a pipe as one that left": func(hosts, _ string) error { return unix.Mkfifo(hosts+"/../gone/pipe.1", 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			s := newTurns(t)
			a, b := s.host("a", 24), s.host("b", 24)
			s.pass(3)
			equal(t, "a is the evictor", a.fellowStats().Evictor, true)
			hosts := filepath.Join(s.dir, shared.Dir, "hosts")
			must(t, os.Mkdir(hosts+"/odd.1", 0o700))
			must(t, plant(hosts, hosts+"/odd.1"))
			stored := 0
			for n := range uint64(60) {
				if err := b.put(n, 0); err == nil {
					stored++
				} else if !errors.Is(err, ErrNoSpace) {
					t.Fatal(err)
				}
				s.pass(3)
				s.within()
			}
			if stored < 50 {
				t.Errorf("%d of 60 puts, want most", stored)
			}
		})
	}
}

// TestForgottenWhileItWaits: a put of an entry's second rank waits for credit while its host is given up and joins again.
// The entry was forgotten; a piece that was added to it would be on the disk and not in this host's account.
func TestForgottenWhileItWaits(t *testing.T) {
	s := newTurns(t)
	var b *fixture
	waits := func() {}
	host := func(id string) (f *fixture) {
		f = fellowOf(t, s.dir, id, 24, 2, func(c *Config) {
			c.UpkeepEvery, c.ScanWait = time.Hour, time.Hour
			c.Roots[0].Poll, c.Roots[0].Lapse = time.Second, turnsLapse
			c.Roots[0].Scheduler = &Scheduler{Now: s.clock, Wait: func(step func()) {
				waits()
				s.turn(f, step)
			}}
		})
		s.hosts = append(s.hosts, f)
		return f
	}
	host("a")
	b = host("b")
	s.pass(3)
	b.must(b.put(1, 0))
	var others []*Put
	for n := uint64(100); b.fellowStats().Free >= pieceBytes; n++ {
		others = append(others, b.begin(n))
	}
	waits = func() {
		waits = func() {}
		s.pause(b)
		s.resume()
		s.pass(6)
	}
	p, err := b.store.Put(t.Context(), b.request(1, 0, 1))
	if err == nil {
		b.must(write(p))
		_ = p.Publish(t.Context())
	} else if !errors.Is(err, ErrNoSpace) {
		t.Error(err)
	}
	for _, p := range others {
		p.Abort(context.Canceled)
	}
	s.pass(4)
	equal(t, "bytes that b counts", b.reckons(), onDisk(t, s.dir))
	b.must(b.check())
	b.must(b.put(1, 1))
}
