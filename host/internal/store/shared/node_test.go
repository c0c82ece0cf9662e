package shared

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// node is a host of the model: a member, an index in memory, and clients, each a thread.
type node struct {
	*Member
	s       *scheduler.Scheduler
	place   place
	h       *scheduler.Thread // the thread that makes the steps
	clients []*scheduler.Thread
	files   staging.FS
	index   map[kv.Key]*item
	touched []uint64 // by others
	ticket  uint64
	audited uint64
	seq     int
	jumps   time.Duration // of its clock, together
	quiet   *bool         // clients only release
}

// place is where the nodes of a model meet.
type place interface {
	path(k kv.Key) string
	// size is the bytes on the disk of a piece.
	size(k kv.Key) (bytes int64, there bool)
	// total is all bytes that count.
	total() int64
	// promises says that what a node has leased is there: the others count on it, and nothing removes behind their backs.
	promises(n *node) bool
	// fails says that operations of a thread may fail.
	fails(t *scheduler.Thread) bool
	// join makes the file system of a node, and what else of its configuration the place decides.
	join(n *node, c *Config)
	// ends says what must hold at the end of a history and does not.
	ends(n []*node) error
}

type item struct {
	bytes    int64
	leases   int
	writing  bool
	proposed bool
	learned  bool // while it was proposed
	unseen   bool // it was there, and could not be looked for since: it counts, and is not granted
}

// grantable says that lookups hit.
func (i *item) grantable() bool { return i != nil && !i.proposed && !i.unseen && i.bytes > 0 }

// found books what a look at a file has found.
func (i *item) found(info staging.Info, err error) {
	switch i.unseen = err != nil && !missing(err) && i.bytes > 0; {
	case err == nil:
		i.bytes = info.Allocated
	case missing(err):
		i.bytes = 0
	}
}

func modelKey(n int) (k kv.Key) {
	k[0], k[1] = byte(n), 1
	return k
}

func (n *node) at(k kv.Key) *item {
	i := n.index[k]
	if i == nil {
		i = &item{}
		n.index[k] = i
	}
	return i
}

func (n *node) Learn(r *Record) bool {
	i := n.at(r.Key)
	i.learned = i.proposed
	if i.bytes == 0 || i.unseen {
		i.bytes, i.unseen = r.Bytes, false
	}
	return true
}

func (n *node) Touched(prints []uint64) { n.touched = append(n.touched, prints...) }

func (n *node) Propose(v *Victim) bool {
	i := n.at(v.Key)
	if i.leases > 0 || i.writing {
		return false
	}
	i.proposed = true
	return true
}

func (n *node) Decide(v *Victim, removed bool) {
	i := n.at(v.Key)
	if removed && !i.learned {
		i.bytes, i.unseen = 0, false
	} else {
		i.found(n.files.Stat(n.place.path(v.Key)))
	}
	i.proposed, i.learned = false, false // not before: as in a host, nothing is granted until it has been looked for
	n.prune(v.Key)
}

func (n *node) prune(k kv.Key) {
	if i := n.index[k]; i != nil && *i == (item{}) {
		delete(n.index, k)
	}
}

// Fenced forgets everything. Puts find that their items are not in the index any more.
func (n *node) Fenced() { clear(n.index) }

func (n *node) Victims(bytes int64) (list []Victim) {
	for k := range modelKeys {
		k := modelKey((k*11 + int(n.s.Now/time.Second)) % modelKeys)
		if i := n.index[k]; i.grantable() && i.leases == 0 && !i.writing && bytes > 0 {
			list = append(list, Victim{Key: k, Pieces: 1, Bytes: i.bytes})
			bytes -= i.bytes
		}
	}
	return list
}

func (n *node) Used() (sum int64) {
	for _, i := range n.index {
		sum += i.bytes
	}
	return sum
}

// Paths cannot name a victim now and then, as when its namespace cannot be read.
func (n *node) Paths(v *Victim) ([]string, error) {
	if n.s.Rng.IntN(50) == 0 {
		return nil, errNameless
	}
	return []string{n.place.path(v.Key)}, nil
}

var errNameless = errors.New("no name")

// Identify finds a temporary damaged now and then, and one that was emptied always. Its name begins with the number of its key.
func (n *node) Identify(name string, _ staging.Info) (Record, error) {
	info, err := n.files.Stat(name)
	var num int
	fmt.Sscanf(path.Base(name), "%d", &num)
	if err == nil && (info.Links > 0 && n.s.Rng.IntN(4) == 0 || info.Size == 0) {
		err = ErrDamaged
	}
	return Record{Key: modelKey(num), Pieces: 1, Bytes: info.Allocated}, err
}

// run is the life of the thread that makes the steps.
func (n *node) run(t *scheduler.Thread) error {
	for {
		fails := n.place.fails(t) // when the step began
		if err := n.Step(); err != nil && !fails {
			return err
		}
		if ticket := n.Ticket(); ticket != 0 && ticket != n.ticket {
			n.scan(ticket)
		}
		if a := n.Audit(); a != 0 && a != n.audited {
			n.audited = a
			n.list(a)
		}
		t.Sleep(modelPoll)
	}
}

// pieces lists the pieces that there are.
func (n *node) pieces() (map[kv.Key]fs.DirEntry, error) {
	list, err := n.files.ReadDir(path.Dir(n.place.path(kv.Key{})))
	seen := map[kv.Key]fs.DirEntry{}
	for _, e := range list {
		var num int
		fmt.Sscan(e.Name(), &num)
		seen[modelKey(num)] = e
	}
	return seen, err
}

// scan looks at everything, and drops what is not there.
func (n *node) scan(ticket uint64) {
	n.ticket = ticket
	seen, err := n.pieces()
	for num := range modelKeys {
		k := modelKey(num) // published since, or gone, if it is in the index alone
		if err == nil && (seen[k] != nil || n.index[k] != nil) {
			err = n.see(k)
		}
	}
	if err != nil {
		n.ticket = 0 // again
		return
	}
	n.Scanned(ticket)
}

func (n *node) see(k kv.Key) error {
	info, err := n.files.Stat(n.place.path(k))
	if n.Ticket() != n.ticket {
		return ErrFenced // it may have gone since
	}
	i := n.at(k)
	if err == nil || !i.writing {
		i.found(info, err)
	}
	n.prune(k)
	if missing(err) {
		return nil
	}
	return err
}

// list makes an audit.
func (n *node) list(ticket uint64) {
	seen, err := n.pieces()
	if err != nil {
		n.audited = 0
		return
	}
	for k, i := range n.index {
		if i.unseen && seen[k] == nil {
			i.bytes, i.unseen = 0, false
			n.prune(k)
		}
	}
	var strays []Stray
	for num := range modelKeys {
		k := modelKey(num)
		if i := n.index[k]; seen[k] != nil && (i == nil || i.bytes == 0 || i.unseen) {
			info, _ := seen[k].Info()
			strays = append(strays, Stray{Path: n.place.path(k), Info: staging.Info{ModTime: info.ModTime()}})
		}
	}
	n.Audited(ticket, strays)
}

// client is the life of a thread that stores and loads.
func (n *node) client(h *scheduler.Thread) error {
	for {
		if *n.quiet {
			for k, i := range n.index {
				i.leases = 0
				n.prune(k)
			}
		} else if err := n.request(modelKey(n.s.Rng.IntN(modelKeys))); err != nil {
			return err
		}
		h.Sleep(time.Duration(n.s.Rng.Int64N(int64(modelPoll / 2))))
	}
}

func (n *node) request(k kv.Key) error {
	i := n.index[k]
	switch n.s.Rng.IntN(4) {
	case 0: // a lookup, and a load
		if n.Fresh() && i.grantable() {
			i.leases++
			n.s.Note(n.s.At, "lease %d", k[0])
			promised, name := n.place.promises(n), n.name
			info, err := n.files.Stat(n.place.path(k))
			if err == nil && info.Allocated == 0 {
				n.ReportDamaged(Record{Key: k, Pieces: 1})
			}
			if missing(err) && promised && n.place.promises(n) && n.name == name && n.index[k] == i && i.leases > 0 {
				return fmt.Errorf("%s holds a lease on %d, and it is gone", n.h.ID, k[0])
			}
		}
	case 1:
		if i != nil && i.leases > 0 {
			i.leases--
			n.prune(k)
		}
	default:
		if i == nil || i.bytes == 0 && !i.proposed && !i.writing {
			return n.put(k)
		}
	}
	return nil
}

func (n *node) put(k kv.Key) error {
	bytes := int64(1+n.s.Rng.IntN(3)) * 4096
	credit, ok := n.Take(bytes)
	if !ok {
		return nil
	}
	n.seq++
	i := n.at(k)
	i.writing = true
	defer func() { i.writing = false; n.prune(k) }()
	n.s.At.Yield() // the engine takes its time
	temp, err := n.Temp(fmt.Sprintf("%s.%d", n.place.path(k), n.seq), credit)
	if err != nil {
		n.Give(credit)
		return nil
	}
	err = n.write(temp, bytes, credit)
	if err == nil {
		err = n.Publish(temp, n.place.path(k), Record{Op: Published, Key: k, Bytes: bytes, Pieces: 1}, &credit)
	}
	switch {
	case err == nil:
		i.bytes, i.unseen = bytes, false
		return nil
	case errors.Is(err, ErrDoubt):
		return nil
	case errors.Is(err, fs.ErrExist): // another host was first
		info, err := n.files.Stat(n.place.path(k))
		if err == nil && info.Allocated == 0 {
			n.ReportDamaged(Record{Key: k, Pieces: 1})
		} else if err == nil && (i.bytes == 0 || i.unseen) && n.index[k] == i {
			i.found(info, nil)
		}
	case !missing(err) && !errors.Is(err, ErrFenced) && !n.place.fails(n.s.At):
		return err
	}
	if err := n.files.Remove(temp); err == nil || missing(err) {
		n.Give(credit)
	}
	return nil
}

func (n *node) write(temp string, bytes int64, credit Credit) error {
	f, err := n.files.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, do := range []func() error{
		func() error { return f.Allocate(bytes / 2) },
		func() error { return f.Allocate(bytes) },
		func() error { _, err := f.WriteAt([]byte("data"), 0); return err },
	} {
		if !n.Holds(credit) {
			return ErrFenced
		}
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}
