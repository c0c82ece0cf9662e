package shared

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// node is a host of the model: a member, an index in memory, and clients, each a thread.
type node struct {
	touched []uint64 // by others
	*Member
	m       *model
	h       *scheduler.Thread // the thread that makes the steps
	clients []*scheduler.Thread
	w       *world
	fs      hostFS
	index   map[kv.Key]*item
	ticket  uint64
	seq     int
	jumps   time.Duration // of its clock, together
}

type item struct {
	bytes    int64
	leases   int
	writing  bool
	proposed bool
	learned  bool // while it was proposed
}

// grantable says that lookups hit.
func (i *item) grantable() bool { return i != nil && !i.proposed && i.bytes > 0 }

func modelKey(n int) (k kv.Key) {
	k[0], k[1] = byte(n), 1
	return k
}

func keyPath(k kv.Key) string { return fmt.Sprintf("/r/p/%d", k[0]) }

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
	if i.bytes == 0 {
		i.bytes = r.Bytes
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
	look := !removed || i.learned
	if !look {
		i.bytes = 0
	} else if info, err := n.fs.Stat(keyPath(v.Key)); err == nil {
		i.bytes = info.Allocated
	} else {
		i.bytes = 0
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
		k := modelKey((k*11 + int(n.w.Now/time.Second)) % modelKeys)
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
	if n.w.Rng.IntN(50) == 0 {
		return nil, errNameless
	}
	return []string{keyPath(v.Key)}, nil
}

var errNameless = errors.New("no name")

// Identify finds a file damaged now and then, and one that was emptied always.
func (n *node) Identify(temp string, info staging.Info) (Record, error) {
	if n.w.Rng.IntN(4) == 0 || info.Size == 0 {
		return Record{}, ErrDamaged
	}
	f, err := n.fs.OpenFile(temp, os.O_RDONLY, 0)
	if err != nil {
		return Record{}, err
	}
	defer f.Close()
	b := make([]byte, info.Size)
	if _, err := f.ReadAt(b, 0); err == io.EOF { // its successor as evictor has emptied it meanwhile
		return Record{}, ErrDamaged
	} else if err != nil {
		return Record{}, err
	}
	var r Record
	err = json.Unmarshal(b, &r)
	r.Op = Published
	return r, err
}

// run is the life of the thread that makes the steps.
func (n *node) run() error {
	for {
		faulty := n.w.faulty // when the step began
		if err := n.Step(); err != nil && !faulty {
			return err
		}
		if t := n.Ticket(); t != 0 && t != n.ticket {
			n.scan(t)
		}
		n.h.Sleep(modelPoll)
	}
}

// scan looks at everything, and drops what is not there.
func (n *node) scan(ticket uint64) {
	n.ticket = ticket
	list, err := n.fs.ReadDir("/r/p")
	if err != nil {
		n.ticket = 0 // again
		return
	}
	seen := map[kv.Key]bool{}
	for _, e := range list {
		var num int
		fmt.Sscan(e.Name(), &num)
		k := modelKey(num)
		seen[k] = true
		n.see(k)
	}
	for num := range modelKeys {
		if k := modelKey(num); !seen[k] && n.index[k] != nil {
			n.see(k) // published since, or gone
		}
	}
	n.Scanned(ticket)
}

func (n *node) see(k kv.Key) {
	info, err := n.fs.Stat(keyPath(k))
	if n.Ticket() != n.ticket {
		return // it may have gone since
	}
	i := n.at(k)
	if err == nil {
		i.bytes = info.Allocated
	} else if !i.writing {
		i.bytes = 0
	}
	n.prune(k)
}

// client is the life of a thread that stores and loads.
func (n *node) client(h *scheduler.Thread) error {
	for {
		if n.m.quiet {
			for k, i := range n.index {
				i.leases = 0
				n.prune(k)
			}
		} else if err := n.request(modelKey(n.w.Rng.IntN(modelKeys))); err != nil {
			return err
		}
		h.Sleep(time.Duration(n.w.Rng.Int64N(int64(modelPoll / 2))))
	}
}

func (n *node) request(k kv.Key) error {
	i := n.index[k]
	switch n.w.Rng.IntN(4) {
	case 0: // a lookup, and a load
		if n.Fresh() && i.grantable() {
			i.leases++
			n.w.Note(n.w.At, "lease %d", k[0])
			promised := n.listed()
			name := n.name
			info, err := n.fs.Stat(keyPath(k))
			if err == nil && info.Allocated == 0 {
				n.ReportDamaged(Record{Key: k, Pieces: 1})
			}
			if err != nil && promised && n.listed() && n.name == name && n.index[k] == i && i.leases > 0 {
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

// listed says that the others count on this host: it was not given up.
func (n *node) listed() bool { return n.w.dirs["/r/.kvhost/shared/hosts/"+n.name] }

func (n *node) put(k kv.Key) error {
	bytes := int64(1+n.w.Rng.IntN(3)) * 4096
	credit, ok := n.Take(bytes)
	if !ok {
		return nil
	}
	n.seq++
	base := fmt.Sprintf("%d.%d", k[0], n.seq)
	i := n.at(k)
	i.writing = true
	defer func() { i.writing = false; n.prune(k) }()
	n.w.At.Yield() // the engine takes its time
	temp, err := n.Temp(base, credit)
	if err != nil {
		n.Give(credit)
		return nil
	}
	r := Record{Op: Published, Key: k, Bytes: bytes, Pieces: 1}
	err = n.write(temp, &r, credit)
	if err == nil {
		err = n.Publish(temp, keyPath(k), r, &credit)
	}
	switch {
	case err == nil:
		i.bytes = bytes
		return nil
	case errors.Is(err, fs.ErrExist): // another host was first
		info, err := n.fs.Stat(keyPath(k))
		if err == nil && info.Allocated == 0 {
			n.ReportDamaged(Record{Key: k, Pieces: 1})
		} else if err == nil && i.bytes == 0 && n.index[k] == i {
			i.bytes = info.Allocated
		}
	case !missing(err) && !errors.Is(err, ErrFenced):
		return err
	}
	if err := n.fs.Remove(temp); err == nil || missing(err) {
		n.Give(credit)
	}
	return nil
}

func (n *node) write(temp string, r *Record, credit Credit) error {
	f, err := n.fs.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	for _, do := range []func() error{
		func() error { return f.Allocate(r.Bytes / 2) },
		func() error { return f.Allocate(r.Bytes) },
		func() error { _, err := f.WriteAt(b, 0); return err },
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
