package bucket

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// node is a host of the model: a member, an index in memory, and clients, each a thread.
type node struct {
	*Member
	m       *model
	w       *world
	fs      pieces
	steps   *scheduler.Thread
	clients []*scheduler.Thread
	index   map[kv.Key]*item
	ticket  uint64
	audited uint64
	seq     uint64
	jumps   time.Duration // of its clock, together
}

type item struct {
	bytes    int64
	leases   int
	writing  bool
	proposed bool
	learned  bool // while it was proposed
	unseen   bool // it was there, and could not be looked for since: it counts, and is not granted
}

func (i *item) grantable() bool { return i != nil && !i.proposed && !i.unseen && i.bytes > 0 }

func modelKey(n int) (k kv.Key) {
	k[0], k[1] = byte(n), 1
	return k
}

func keyPath(k kv.Key) string { return fmt.Sprintf("p/%d", k[0]) }

func (n *node) item(k kv.Key) *item {
	i := n.index[k]
	if i == nil {
		i = &item{}
		n.index[k] = i
	}
	return i
}

func (n *node) Learn(r *shared.Record) bool {
	n.w.note("%s LEARNS %d %d %d", n.name, r.Op, r.Key[0], r.Bytes)
	i := n.item(r.Key)
	i.learned = i.proposed
	if i.bytes == 0 || i.unseen {
		i.bytes, i.unseen = r.Bytes, false
	}
	return true
}

func (n *node) Touched([]uint64) {}

func (n *node) Propose(v *shared.Victim) bool {
	i := n.item(v.Key)
	if i.leases > 0 || i.writing {
		n.prune(v.Key)
		return false
	}
	i.proposed = true
	return true
}

func (n *node) Decide(v *shared.Victim, removed bool) {
	i := n.item(v.Key)
	if removed && !i.learned {
		i.bytes = 0
	} else if info, err := n.fs.Stat(keyPath(v.Key)); err == nil {
		i.bytes, i.unseen = info.Allocated, false
	} else if i.unseen = !errors.Is(err, fs.ErrNotExist); !i.unseen {
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

func (n *node) Victims(bytes int64) (list []shared.Victim) {
	for k := range modelKeys {
		k := modelKey((k*11 + int(n.w.Now/time.Second)) % modelKeys)
		if i := n.index[k]; i.grantable() && i.leases == 0 && !i.writing && bytes > 0 {
			list = append(list, shared.Victim{Key: k, Pieces: 1, Bytes: i.bytes})
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

var errNameless = errors.New("no name")

// Paths cannot name a victim now and then, as when its namespace cannot be read.
func (n *node) Paths(v *shared.Victim) ([]string, error) {
	if n.w.Rng.IntN(50) == 0 {
		return nil, errNameless
	}
	return []string{keyPath(v.Key)}, nil
}

func (n *node) Identify(name string, _ staging.Info) (r shared.Record, err error) {
	info, err := n.fs.Stat(name)
	var num int
	fmt.Sscanf(name, "p/%d", &num)
	return shared.Record{Key: modelKey(num), Pieces: 1, Bytes: info.Allocated}, err
}

// run is the life of the thread that makes the steps.
func (n *node) run(t *scheduler.Thread) error {
	for {
		_ = n.Step()
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

// scan looks at everything, and drops what is not there.
func (n *node) scan(ticket uint64) {
	n.ticket = ticket
	var seen []string
	if err := n.w.request("list", "p", func() error { seen = n.w.names("p"); return nil }); err != nil {
		n.ticket = 0 // again
		return
	}
	for _, name := range seen {
		var num int
		fmt.Sscan(name, &num)
		if !n.see(modelKey(num)) {
			n.ticket = 0
		}
	}
	for num := range modelKeys {
		if k := modelKey(num); n.index[k] != nil && !n.see(k) { // published since, or gone
			n.ticket = 0
		}
	}
	if n.ticket != 0 {
		n.Scanned(ticket)
	}
}

func (n *node) see(k kv.Key) (ok bool) {
	info, err := n.fs.Stat(keyPath(k))
	if n.Ticket() != n.ticket {
		return false // it may have gone since
	}
	i := n.item(k)
	switch {
	case err == nil:
		i.bytes, i.unseen = info.Allocated, false
	case !errors.Is(err, fs.ErrNotExist):
		n.prune(k)
		return false
	case !i.writing:
		i.bytes, i.unseen = 0, false
	}
	n.prune(k)
	return true
}

// list makes an audit.
func (n *node) list(ticket uint64) {
	seen := map[string]staging.Info{}
	if err := n.w.request("list", "p", func() error {
		for _, name := range n.w.names("p") {
			seen[name] = staging.Info{ModTime: n.w.objects["p/"+name].stored}
		}
		return nil
	}); err != nil {
		n.audited = 0
		return
	}
	for k, i := range n.index {
		if i.unseen && seen[keyPath(k)[len("p/"):]] == (staging.Info{}) {
			i.bytes, i.unseen = 0, false
			n.prune(k)
		}
	}
	var strays []Stray
	for _, name := range slices.Sorted(maps.Keys(seen)) {
		var num int
		fmt.Sscan(name, &num)
		if i := n.index[modelKey(num)]; i == nil || i.bytes == 0 || i.unseen {
			strays = append(strays, Stray{Path: "p/" + name, Info: seen[name]})
		}
	}
	n.Audited(ticket, strays)
}

// client is the life of a thread that stores and loads.
func (n *node) client(t *scheduler.Thread) error {
	for {
		if n.m.quiet {
			for k, i := range n.index {
				i.leases = 0
				n.prune(k)
			}
		} else {
			n.request(modelKey(n.w.Rng.IntN(modelKeys)))
		}
		t.Sleep(time.Duration(n.w.Rng.Int64N(int64(modelPoll / 2))))
	}
}

func (n *node) request(k kv.Key) {
	i := n.index[k]
	switch n.w.Rng.IntN(4) {
	case 0: // a lookup
		if n.Fresh() && i.grantable() {
			i.leases++
			n.w.note("lease %d", k[0])
		}
	case 1:
		if i != nil && i.leases > 0 {
			i.leases--
			n.prune(k)
		}
	default:
		if i == nil || i.bytes == 0 && !i.proposed && !i.writing {
			n.put(k)
		}
	}
}

func (n *node) put(k kv.Key) {
	bytes := int64(1+n.w.Rng.IntN(3)) * 4096
	credit, ok := n.Take(bytes)
	if !ok {
		return
	}
	n.seq++
	i := n.item(k)
	i.writing = true
	defer func() { i.writing = false; n.prune(k) }()
	n.w.At.Yield() // the engine takes its time
	temp, err := n.Temp(fmt.Sprintf("p/.%d.%d", k[0], n.seq), credit)
	if err != nil {
		n.Give(credit)
		return
	}
	n.fs.temps[temp] = staging.Info{Size: bytes, Allocated: bytes, Ino: n.m.ids + n.seq}
	n.m.ids += 1000
	err = n.Publish(temp, keyPath(k), shared.Record{Op: shared.Published, Key: k, Bytes: bytes, Pieces: 1}, &credit)
	switch {
	case err == nil:
		i.bytes, i.unseen = bytes, false
		return
	case errors.Is(err, fs.ErrExist): // another host was first
		if info, err := n.fs.Stat(keyPath(k)); err == nil && (i.bytes == 0 || i.unseen) && n.index[k] == i {
			i.bytes, i.unseen = info.Allocated, false
		}
	case errors.Is(err, shared.ErrDoubt):
		return
	}
	delete(n.fs.temps, temp)
	n.Give(credit)
}
