package storetest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// node is a host of a running history.
type node struct {
	Host
	r       *runner
	cfg     store.Config
	dir     string
	store   Store            // nil while it is closed
	faults  *faultfs.FS      // of this life
	machine *faultfs.Machine // nil: its power never fails
	lost    bool             // the machine lost its power
	armed   bool             // the process or its machine ends at some call

	puts   map[uint64]*put
	leases map[uint64]*lease

	asleep  int         // steps that it will miss
	doubted atomic.Bool // others gave it up, or may have, and it has made no step since
	inStep  atomic.Bool
	before  []Entry // hits at the end of the last life
	// Inodes of damaged files that a scan left alone, by name.
	left  map[string]uint64
	owed  durable
	final Op // the policies of the last life
}

// put is a put with what it is of.
type put struct {
	Put
	of      Piece
	version uint64
}

// lease is a lease with the keys that it is on.
type lease struct {
	Lease
	n       *node
	keys    []Entry
	granted []Entry        // of them, while none may go
	lost    map[Entry]bool // a load found its file bad, and the entry went
	doubted bool           // others gave the host up since, or may have: what it is on may be gone
}

const (
	pollEvery = time.Second
	lapse     = 10 * time.Second
)

func (r *runner) newNode(host Host) *node {
	n := &node{Host: host, r: r, dir: r.dir, puts: map[uint64]*put{}, leases: map[uint64]*lease{}}
	k := &r.h.Kind
	n.cfg = store.Config{
		Seed: r.h.Seed, HostID: host.ID, Log: slog.New(slog.DiscardHandler), Now: newClock(),
		ScanWorkers: 1, ScanWait: time.Hour, IOTimeout: time.Hour, // a busy machine is no fault
		Strict: host.Strict, UpkeepEvery: time.Hour, // operations do the stores' own work
		QuarantineFiles: 3, Moves: store.Moves{Workers: 1},
	}
	for i := range k.roots {
		root := store.RootConfig{
			Path:     filepath.Join(r.dir, fmt.Sprintf("root%d", i)),
			Capacity: int64(20+4*i)*pieceBytes + 7*pieceformat.Page, MaxEntries: 80,
		}
		root.Compressed = k.stored && (i%2 == 0) != k.before
		root.Volatile = k.before && i == 0
		if k.levels {
			root.Level, root.Capacity = i, int64(6+12*i)*pieceBytes+7*pieceformat.Page
			if i+1 < k.roots {
				root.Write = store.Write(r.h.Seed / uint64(len(kinds)) % 3)
			}
		}
		if k.hosts > 1 {
			root.Capacity = 48 * pieceBytes
			root.Shared, root.Poll, root.Lapse = true, pollEvery, lapse
			root.Scheduler = &store.Scheduler{Now: r.clock, Wait: n.wait}
		}
		n.cfg.Roots = append(n.cfg.Roots, root)
	}
	return n
}

// newClock returns a clock that moves by a millisecond each time it is read.
func newClock() func() time.Time {
	start := time.Unix(1_700_000_000, 0)
	var n atomic.Int64
	return func() time.Time { return start.Add(time.Duration(n.Add(1)) * time.Millisecond) }
}

func (n *node) trash() string { return filepath.Join(n.dir, "trash") }

// open starts a life of the host, on a new machine if the last one lost its power.
func (n *node) open(op Op) (err error) {
	under := n.r.files
	if n.r.h.Kind.power {
		if n.machine == nil || n.lost {
			if n.machine, err = faultfs.NewMachine(staging.OS(), n.trash()); err != nil {
				return err
			}
		}
		under = n.machine
	}
	n.faults = faultfs.New(under)
	n.cfg.FS = n.faults
	n.asleep, n.lost, n.armed = 0, false, false
	n.doubted.Store(false)
	clear(n.puts)
	clear(n.leases)
	release, err := n.choosePolicies(op)
	if err != nil {
		return err
	}
	if op.has("unplug") {
		call, seed := parsePair(op.get("unplug"))
		n.arm(call, true, seed)
	}
	s, err := n.r.opt.Open(context.Background(), n.cfg, n.r.slots)
	release()
	if k := &n.r.h.Kind; k.faults != "" || k.power { // these are no faults of a session's start
		for space := range namespaces {
			if err == nil {
				if err = s.Use(context.Background(), space); err != nil {
					err = errors.Join(err, s.Close())
				}
			}
		}
	}
	if err != nil {
		if n.armed && errors.Is(err, faultfs.ErrPowerLost) {
			n.lost, n.before = true, nil
			return nil
		}
		return fmt.Errorf("opening host %s: %w", n.ID, err)
	}
	n.store = s
	if err := noteLeft(n); err != nil {
		return err
	}
	if n.r.h.Kind.lives {
		if err := n.owed.reopened(n); err != nil {
			return err
		}
		return n.readAll()
	}
	if err := n.kept(); err != nil {
		return err
	}
	n.faults.Set(n.r.rules...)
	return nil
}

// choosePolicies opens the policies of a life. The caller must call release when the store is open: it has its own
// references.
func (n *node) choosePolicies(op Op) (release func(), err error) {
	builtin := func(role abi.Role) *policy.Handle {
		return policy.NewHandle(policy.Builtin(role), role.String(), nil, nil)
	}
	p := &n.cfg.Policies
	*p = store.Policies{Admit: builtin(abi.RoleAdmit), Place: builtin(abi.RolePlace), Layout: builtin(abi.RoleLayout)}
	if name := op.get(abi.RoleEvict.String()); name != "" {
		if p.Evict, err = n.r.policies.role(abi.RoleEvict, name, ""); err != nil {
			return nil, err
		}
	}
	if name := op.get(abi.RolePlace.String()); name != "" {
		if p.Place, err = n.r.policies.role(abi.RolePlace, name, "place"); err != nil {
			return nil, err
		}
	}
	return func() {
		for _, h := range [...]*policy.Handle{p.Evict, p.Admit, p.Place, p.Layout} {
			if h != nil {
				h.Release()
			}
		}
	}, nil
}

// arm lets the n-th operation on files from now on be the process's last, or the machine's.
func (n *node) arm(call uint64, power bool, seed uint64) {
	rule := faultfs.Rule{
		Op: staging.OpAny, Path: "**", When: faultfs.When{First: call, Seed: seed}, Fault: faultfs.Fault{Errno: syscall.EIO},
	}
	if power {
		rule.Fault = faultfs.Fault{Power: true}
	}
	n.faults.Set(rule)
	n.armed = true
}

// died says whether the process or its machine has ended at the call that [node.arm] named.
func (n *node) died() bool { return n.armed && n.faults.Injected() > 0 || n.powerLost() }

func (n *node) powerLost() bool {
	if n.machine == nil {
		return false
	}
	_, err := n.machine.Stat(n.dir)
	return errors.Is(err, faultfs.ErrPowerLost)
}

// letGo releases leases and aborts puts.
func (n *node) letGo() {
	for _, l := range n.leases {
		l.Release()
	}
	for _, id := range sortedKeys(n.puts) {
		n.puts[id].Abort(errAborted)
	}
	clear(n.leases)
	clear(n.puts)
}

// close closes the store in order.
func (n *node) close(op Op) error {
	n.faults.Set()
	n.armed = false
	n.letGo()
	n.asleep = 0
	if op.has("unplug") {
		call, seed := parsePair(op.get("unplug"))
		n.arm(call, true, seed)
	} else if err := n.putBack(); err != nil {
		return err
	} else if n.r.h.Kind.levels { // a copy that is under way makes room in its level, and an entry may go without one
		if err := n.settle(); err != nil {
			return err
		}
	}
	var err error
	if n.before, err = n.present(); err != nil {
		return err
	}
	n.owed.ends(n)
	err = n.store.Close()
	n.store = nil
	if n.armed {
		n.before = nil
		return nil // who closes a store on a machine without power gets errors
	}
	return err
}

// crash ends the process at once: nothing that it does from now on reaches its files.
func (n *node) crash() error {
	n.asleep = 0
	n.r.killed++
	var err error
	if n.before = nil; !n.armed {
		if n.before, err = n.present(); err != nil {
			return err
		}
	}
	n.owed.ends(n)
	n.faults.Set(faultfs.Rule{Op: staging.OpAny, Path: "**", Fault: faultfs.Fault{Errno: syscall.EACCES}})
	if n.letGo(); !n.r.h.Kind.exact() {
		n.r.model.dies()
	}
	err = n.store.Close()
	n.store = nil
	if n.machine != nil {
		n.lost = n.powerLost()
		return nil
	}
	return err
}

// losePower ends the machine.
func (n *node) losePower(seed uint64) error {
	n.owed.ends(n)
	if err := n.machine.PowerLoss(seed); err != nil {
		return err
	}
	n.r.model.dies()
	n.lost, n.before = true, nil
	if n.store == nil {
		return nil
	}
	n.r.killed++
	n.letGo()
	_ = n.store.Close() // nothing that it does succeeds
	n.store = nil
	return nil
}

// putBack puts every root that is out of service back, which must succeed at once.
func (n *node) putBack() error {
	for i, root := range n.store.Stats().Roots {
		if root.State <= health.Full {
			continue
		}
		if err := n.store.Maintain(context.Background(), i, store.Probe); err != nil {
			return fmt.Errorf("host %s: root %d is %s and cannot be put back: %w", n.ID, i, root.State, err)
		}
		if now := n.store.Stats().Roots[i].State; now != health.In {
			return fmt.Errorf("host %s: root %d is %s after it was put back", n.ID, i, now)
		}
	}
	return nil
}

// present lists the entries that are hits.
func (n *node) present() (list []Entry, err error) {
	for space := range namespaces {
		for key := range uint64(numKeys) {
			e := Entry{space, key}
			there, err := n.has(e)
			if err != nil {
				return nil, err
			}
			if there {
				list = append(list, e)
			}
		}
	}
	return list, nil
}

// has says whether an entry is, or would be, a hit. Among levels a lookup that finds one has it copied near, for which others go: there it
// is looked for without a hit.
func (n *node) has(e Entry) (bool, error) {
	if n.r.h.Kind.levels {
		return n.store.Has(e)
	}
	return n.hit(e)
}

// hit says whether an entry is a hit.
func (n *node) hit(e Entry) (bool, error) {
	l, err := n.store.Lookup(e.Space, []uint64{e.Key}, 0)
	if err != nil {
		return false, fmt.Errorf("host %s: looking %s up: %w", n.ID, e, err)
	}
	defer l.Release()
	return l.Hits() == 1, nil
}

// kept checks that what was a hit still is one. It need not be with faults or after a loss of power: files whose removal
// failed, or was lost, come back and push others out. Nor need it be where another host evicts, nor in memory:
// memory that outlives its host is the model's own.
func (n *node) kept() error {
	k := &n.r.h.Kind
	if k.faults != "" || n.armed || k.hosts > 1 || k.memory {
		return nil
	}
	for _, e := range n.before {
		if there, err := n.has(e); err != nil {
			return err
		} else if !there && !n.r.model.isDamaged(e) {
			return fmt.Errorf("host %s: entry %s was a hit before the restart and is not one now", n.ID, e)
		}
	}
	return nil
}

// removeMachine removes what a machine keeps beside the roots.
func (n *node) removeMachine() error { return os.RemoveAll(n.trash()) }
