package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/staging"
)

// What a root may take for pieces is less by its directories beyond what is tolerated: those that are there at the start,
// those that are made, and not those that have gone.
func TestDirectoriesAreCounted(t *testing.T) {
	const bytes = 100 << 20
	root := filepath.Join(t.TempDir(), "kv")
	for _, dir := range []string{"a/b/c", "a/d"} {
		testenv.OK(t, os.MkdirAll(root+"/"+dir, 0o700))
	}
	account := capacity.New(capacity.Config{Dir: root, Bounds: capacity.Bounds{Capacity: bytes}, Now: time.Now})
	tolerated := int64(1<<20) - 6*dirBytes // less the root's own, four in it, and one that comes
	account.Directories(tolerated)
	d := New(Config{Path: root, Account: account, Health: health.NewMonitor(health.Config{Dir: root, FS: staging.OS(), Now: time.Now})})
	d.OwnDirs()
	left := func(want int64) {
		t.Helper()
		if got := account.Figures().Limit; got != bytes-want*dirBytes {
			t.Fatalf("%d bytes are left for pieces, want %d less %d directories", got, bytes, want)
		}
	}
	d.CountDirs(t.Context())
	left(0)
	file := root + "/a/b/x/y/z"
	if err := d.MakeDir(filepath.Dir(file)); err != nil { // two of them are new
		t.Fatal(err)
	}
	left(1)
	testenv.OK(t, d.MakeDir(filepath.Dir(file)))
	left(1)
	testenv.OK(t, os.WriteFile(file, nil, 0o600))
	d.Leave(file) // the file is in it
	left(1)
	if _, err := d.Remove(file, 0); err != nil {
		t.Fatal(err)
	}
	left(0)
	account.SetBounds(capacity.Bounds{Capacity: bytes, ForPieces: true})
	account.Directories(2 << 20)
	left(0)
	if account.DirectoriesGo() {
		t.Error("directories go where they are not counted")
	}
	if _, err := os.Stat(root + "/a/b/c"); err != nil {
		t.Error("a directory went in which another is: ", err)
	}
	if _, err := os.Stat(root + "/a/b/x"); !os.IsNotExist(err) {
		t.Error("an empty directory stayed: ", err)
	}
}

// An empty directory stays while directories take no more than what is tolerated, but in a small root, where that is much.
func TestToleratedDirectoriesStay(t *testing.T) {
	for _, test := range []struct {
		capacity, others int64
		goes             bool
	}{{1 << 40, 0, false}, {1 << 40, 1 << 40 / 256, true}, {100 << 20, 0, true}} {
		root := filepath.Join(t.TempDir(), "kv")
		account := capacity.New(capacity.Config{Dir: root, Bounds: capacity.Bounds{Capacity: test.capacity}, Now: time.Now})
		account.Directories(test.others)
		d := New(Config{Path: root, Account: account, Health: health.NewMonitor(health.Config{Dir: root, FS: staging.OS(), Now: time.Now})})
		d.OwnDirs()
		file := root + "/a/b/piece"
		testenv.OK(t, d.MakeDir(filepath.Dir(file)))
		d.Leave(file)
		if _, err := os.Stat(root + "/a"); os.IsNotExist(err) != test.goes {
			t.Errorf("of %d bytes, with %d of other directories: %v", test.capacity, test.others, err)
		}
	}
}

// meanwhile lets directories come and go after a directory is listed and before the count has the list.
type meanwhile struct {
	staging.FS
	then map[string]func()
}

func (m meanwhile) ReadDir(dir string) ([]fs.DirEntry, error) {
	list, err := m.FS.ReadDir(dir)
	if then := m.then[dir]; then != nil {
		delete(m.then, dir)
		then()
	}
	return list, err
}

// Directories that come and go while they are counted are in the account as often as they are on the disk.
func TestDirectoriesChangeWhileCounted(t *testing.T) {
	const bytes = 100 << 20
	root := filepath.Join(t.TempDir(), "kv")
	for _, dir := range []string{"a/b/c", "a/d", "e/f/g", "h", "i/j", "k/l"} {
		testenv.OK(t, os.MkdirAll(root+"/"+dir, 0o700))
	}
	account := capacity.New(capacity.Config{Dir: root, Bounds: capacity.Bounds{Capacity: bytes}, Now: time.Now})
	account.Directories(2 << 20) // of others
	fsys := meanwhile{staging.OS(), map[string]func(){}}
	d := New(Config{Path: root, Account: account, Health: health.NewMonitor(health.Config{Dir: root, FS: fsys, Now: time.Now})})
	d.OwnDirs()
	comes := func(dir string) {
		testenv.NoError(t, d.MakeDir(root+"/"+dir))
	}
	goes := func(dir string) { d.Leave(root + "/" + dir + "/piece") }
	fsys.then[root] = func() {
		comes("m/n") // in what is being read, with one in it
		goes("h")
		goes("a/d") // in what is not read yet
		comes("i/o")
		goes("k/l") // and with it k
		comes("k/p/q")
	}
	fsys.then[root+"/e"] = func() {
		goes("e/f/g") // and with it e/f and e
		comes("e/r")
		comes("s")
		comes("m/t")
	}
	comes("a/u") // before the count
	d.CountDirs(t.Context())
	d.CountDirs(t.Context()) // as of a root that is opened again
	comes("v")
	goes("v")
	want := int64(0)
	if err := filepath.WalkDir(root, func(_ string, e fs.DirEntry, err error) error {
		if want++; e == nil || !e.IsDir() {
			want--
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if got := (bytes - account.Figures().Limit - 1<<20) / dirBytes; got != want || len(fsys.then) > 0 {
		t.Errorf("%d directories in the account, %d on the disk; %d were not read", got, want, len(fsys.then))
	}
}

// TestOrphansAreBounded: the list takes so many and no more, and nothing is left of those that are gone.
func TestOrphansAreBounded(t *testing.T) {
	var l Orphans
	l.init(&Dir{account: capacity.New(capacity.Config{})})
	for n := range maxOrphans {
		l.add(&Orphan{name: fmt.Sprint("/root/", n)})
	}
	l.add(&Orphan{name: "/root/more"})
	if l.Has("/root/more") || !l.Has(fmt.Sprint("/root/", maxOrphans-1)) || l.Has("/other/7") {
		t.Error("the list takes one more than its bound, or does not know what it has")
	}
	for o := l.first(); o != nil; o = l.first() {
		l.deleted(o, nil)
	}
	if len(l.by) > 0 {
		t.Errorf("%d names are left of an empty list", len(l.by))
	}
}

// TestClaimWaitsForAnUnlink: a put that needs an orphan's name gets it when the orphan is no longer being unlinked. One that
// could not be is still listed, and tried again.
func TestClaimWaitsForAnUnlink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Orphans
		l.init(&Dir{account: capacity.New(capacity.Config{})})
		l.add(&Orphan{name: "/root/a"})
		o := l.first()
		var got []*Orphan
		claimed := false
		go func() { got, claimed = l.Claim("/root/a"), true }()
		synctest.Wait()
		if claimed {
			t.Error("an orphan was claimed while it is being unlinked, want the claim to wait")
		}
		l.deleted(o, errors.New("it stays"))
		synctest.Wait()
		if !claimed || len(got) != 1 || l.len() != 0 {
			t.Errorf("claimed %t: %d orphans, %d to be tried, want the one, and none", claimed, len(got), l.len())
		}
		if l.unclaim(o, false); l.first() != o {
			t.Error("the orphan is not tried again after its claim, want it first in the list")
		}
	})
}

// TestAFileInQuarantineIsBookedOnce: two looks at the quarantine may meet a file at the same time.
func TestAFileInQuarantineIsBookedOnce(t *testing.T) {
	account := capacity.New(capacity.Config{})
	var q Quarantine
	q.init(&Dir{account: account}, Config{QuarantineFiles: 2, QuarantineBytes: 100})
	for range 2 {
		q.enter(Kept{name: "a", Bytes: 7}, true)
	}
	if got := account.Figures().Quarantine; got != 7 || q.Count() != 1 {
		t.Errorf("%d bytes and %d files are booked, want 7 and 1", got, q.Count())
	}
}

// TestAnOrphanIsBookedOnce: a file that fails again with more bytes is in the account with those, beside a renamed one of the same name.
// Nothing is left of either when a put has taken the name.
func TestAnOrphanIsBookedOnce(t *testing.T) {
	account := capacity.New(capacity.Config{})
	var l Orphans
	l.init(&Dir{account: account})
	l.AddRenamed("/root/a", staging.Info{}, 5)
	for _, c := range [][2]int64{{10, 15}, {30, 35}, {7, 35}} {
		l.again("/root/a", c[0])
		if got := account.Figures().Orphans; got != c[1] {
			t.Errorf("%d bytes are booked after %d of the file, want %d", got, c[0], c[1])
		}
	}
	l.Settle(l.Claim("/root/a"), true)
	if got := account.Figures().Orphans; got != 0 || len(l.by) > 0 {
		t.Errorf("%d bytes and %d names are left, want none", got, len(l.by))
	}
}

// TestStampsAfterAWrongClock: store times increase while a clock stands still or is set back a little, and restart from it where it was far
// ahead.
func TestStampsAfterAWrongClock(t *testing.T) {
	now := time.Unix(1000, 0)
	var s Sequence
	s.Init(func() time.Time { return now }, "host")
	first := s.Stamp()
	now = now.Add(-time.Minute)
	if second := s.Stamp(); second != first+1 {
		t.Errorf("the store time after %d is %d, want one more", first, second)
	}
	now = now.Add(-2 * farAhead)
	if third := s.Stamp(); third != now.UnixNano() {
		t.Errorf("the store time is %d after a clock that was far ahead, want %d", third, now.UnixNano())
	}
}
