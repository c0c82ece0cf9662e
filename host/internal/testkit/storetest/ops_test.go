package storetest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// verb is a sort of operation.
type verb struct {
	run    func(n operator, op Op) (string, error)
	closed bool // it makes sense on a host that is closed
}

// parsePair reads two numbers: NUMBER:SEED.
func parsePair(text string) (n, seed uint64) {
	head, tail, _ := strings.Cut(text, ":")
	n, _ = strconv.ParseUint(head, 10, 64)
	seed, _ = strconv.ParseUint(tail, 10, 64)
	return n, seed
}

// verbs are described in the package's comment.
var verbs = map[string]verb{
	"Open":       {operator.runOpen, true},
	"Close":      {operator.runClose, false},
	"Crash":      {operator.runCrash, false},
	"PowerLoss":  {operator.runPowerLoss, true},
	"Arm":        {operator.runArm, false},
	"Store":      {operator.runStore, false},
	"Begin":      {operator.runBegin, false},
	"Publish":    {operator.runPublish, false},
	"Abort":      {operator.runAbort, false},
	"Lookup":     {operator.runLookup, false},
	"Release":    {operator.runRelease, false},
	"Discard":    {operator.runDiscard, false},
	"EndRequest": {operator.runEndRequest, false},
	"Maintain":   {operator.runMaintain, false},
	"Swap":       {operator.runSwap, false},
	"Damage":     {operator.runDamage, false},
	"Turns":      {operator.runTurns, false},
	"Sleep":      {operator.runSleep, false},
	"Pause":      {operator.runPause, false},
	"Rush":       {operator.runRush, false},
	"Finish":     {operator.runFinish, true},
}

var errAborted = errors.New("the history gives the put up")

// operator runs the operations of a history on a node.
type operator struct{ *node }

func (n operator) runOpen(op Op) (string, error) {
	if n.store != nil {
		return "open", nil
	}
	n.final = op
	err := n.open(op)
	if n.store == nil && err == nil {
		return "power lost", nil
	}
	return fmt.Sprintf("%d hits before", len(n.before)), err
}

func (n operator) runClose(op Op) (string, error) { return "", n.close(op) }
func (n operator) runCrash(Op) (string, error)    { return "", n.crash() }

func (n operator) runEndRequest(Op) (string, error) {
	n.store.EndRequest()
	return "", nil
}

func (n operator) runFinish(op Op) (string, error) {
	n.final = op
	return "", nil
}

func (n operator) runPowerLoss(op Op) (string, error) {
	if n.machine == nil {
		return "no machine", nil
	}
	return "", n.losePower(op.number("seed"))
}

func (n operator) runArm(op Op) (string, error) {
	n.asleep = 0
	doubt(n.node)
	n.arm(op.number("call"), op.get("power") == "true" && n.machine != nil, op.number("seed"))
	return "", nil
}

// begin reserves room for a piece.
func (n *node) begin(of Piece) (*put, error) {
	p, err := n.store.Begin(context.Background(), of)
	if err != nil {
		return nil, err
	}
	return &put{Put: p, of: of, version: uint64(n.r.model.tick())}, nil
}

// write writes a put's piece.
func (p *put) write() error {
	return p.Write(func(size int64) []byte { return content(p.of, p.version, size) })
}

// publish writes and publishes a put's piece. It may be served from the moment that it is written.
func (n *node) publish(p *put) error {
	if err := p.write(); err != nil {
		p.Abort(err)
		return err
	}
	what := act{offered, p.version}
	if k := &n.r.h.Kind; k.exact() && k.hosts == 1 && !k.levels {
		what.verb = stored
	}
	published := n.r.model.written(p.of, what)
	err := p.Publish(context.Background())
	if err == nil {
		published()
		n.r.stored.Add(1)
	}
	return err
}

// mayFail says whether a put may end in an error. Under the name of a piece of a shared root a damaged file may stand,
// which the evictor is then asked to remove.
func (n *node) mayFail(err error) bool {
	k := &n.r.h.Kind
	return acceptable(err) || k.hosts > 1 && pieceformat.IsDamage(err) ||
		n.r.rules != nil && errors.Is(err, store.ErrSync) || // a batch failed while the piece was written
		k.pauses && isAny(err, fs.ErrNotExist, store.ErrShort) // of an incarnation that is gone, or emptied
}

// storePiece stores a piece.
func (n *node) storePiece(of Piece) error {
	p, err := n.begin(of)
	if err == nil {
		err = n.publish(p)
	}
	if !n.mayFail(err) {
		n.r.report(fmt.Errorf("host %s: storing piece %s: %w", n.ID, of, err))
	}
	return err
}

// storeEntry stores both pieces of an entry.
func (n *node) storeEntry(e Entry) string {
	var results []string
	for rank := range uint32(numRanks) {
		if n.r.h.Kind.lives && n.died() {
			return "dead"
		}
		err := n.storePiece(Piece{e, rank})
		results = append(results, fmt.Sprint(err))
	}
	return strings.Join(results, ", ")
}

func (n operator) runStore(op Op) (string, error) {
	of := parsePiece(op.get("entry"))
	return n.storeEntry(of.Entry), nil
}

func (n operator) runBegin(op Op) (string, error) {
	of := parsePiece(op.get("piece"))
	p, err := n.begin(of)
	if !acceptable(err) {
		return "", err
	}
	if err == nil {
		n.puts[op.number("put")] = p
	}
	return fmt.Sprint(err), nil
}

// take takes a put out of those that are under way.
func (n *node) take(op Op) *put {
	id := op.number("put")
	p := n.puts[id]
	delete(n.puts, id)
	return p
}

func (n operator) runPublish(op Op) (string, error) {
	p := n.take(op)
	if p == nil {
		return "no such put", nil
	}
	err := n.publish(p)
	if !n.mayFail(err) {
		return "", err
	}
	return fmt.Sprint(err), nil
}

func (n operator) runAbort(op Op) (string, error) {
	p := n.take(op)
	if p == nil {
		return "no such put", nil
	}
	if op.get("written") == "true" {
		_ = p.write() // it is given up all the same
	}
	p.Abort(errAborted)
	return "", nil
}

func (n operator) runMaintain(op Op) (string, error) {
	task := map[string]store.Task{"retry": store.RetryRemovals, "probe": store.Probe}[op.get("task")]
	root := int(op.number("root"))
	if root >= len(n.cfg.Roots) {
		return "no such root", nil
	}
	return fmt.Sprint(n.store.Maintain(context.Background(), root, task)), nil
}

func (n operator) runSwap(op Op) (string, error) {
	for role := range abi.Role(abi.Roles) {
		if role.String() == op.get("role") {
			return n.swap(role, op.get("policy"))
		}
	}
	return "no such role", nil
}

func (n *node) swap(role abi.Role, name string) (string, error) {
	h, err := n.r.policies.role(role, name, "")
	if err != nil {
		return "", err
	}
	defer h.Release()
	s := store.Swap{}
	if role != abi.RoleEvict {
		s.From = role.String() // as choosePolicies calls them
	}
	s.Policies[role] = h
	err = n.store.Swap(context.Background(), s)
	if !acceptable(err) && !n.r.h.Kind.many {
		return "", err
	}
	return fmt.Sprint(err), nil
}

func (n operator) runTurns(op Op) (string, error) {
	if n.r.h.Kind.hosts > 1 {
		for range op.number("n") {
			n.turn()
		}
	}
	return "", nil
}

// runSleep keeps a host from its steps, perhaps for so long that the others give it up.
func (n operator) runSleep(op Op) (string, error) {
	for _, o := range n.r.nodes {
		if o.asleep > 0 {
			return "another host sleeps", nil
		}
	}
	n.asleep = int(op.number("n"))
	doubt(n.node)
	return "", nil
}

func (n operator) runLookup(op Op) (string, error) {
	of := parsePiece(op.get("entry"))
	l, err := n.lookup(of.Entry, int(op.number("n")), 0)
	if err != nil {
		return "", err
	}
	n.loadAll(l, op.get("ranks"))
	if op.has("hold") && n.leases[op.number("hold")] == nil {
		n.leases[op.number("hold")] = l
	} else {
		l.Release()
	}
	return fmt.Sprintf("%d hits", l.Hits()), nil
}

func (n operator) runRelease(op Op) (string, error) {
	l := n.leases[op.number("lease")]
	if l == nil {
		return "no such lease", nil
	}
	n.loadAll(l, op.get("ranks")) // what a lease is on stays
	l.Release()
	delete(n.leases, op.number("lease"))
	return "", nil
}

// lookup asks for a run of keys.
func (n *node) lookup(from Entry, count int, ranks uint64) (*lease, error) {
	l := &lease{n: n, lost: map[Entry]bool{}, doubted: n.doubted.Load()}
	began := n.r.model.tick()
	var keys []uint64
	for i := range uint64(count) {
		l.keys = append(l.keys, Entry{from.Space, from.Key + i})
		keys = append(keys, from.Key+i)
	}
	var err error
	if l.Lease, err = n.store.Lookup(from.Space, keys, ranks); err != nil {
		return nil, fmt.Errorf("host %s: looking %d keys up from %s: %w", n.ID, count, from, err)
	}
	if n.r.h.Kind.exact() && !l.doubted && ranks == 0 {
		l.granted = l.keys[:l.Hits()]
		l.did(granted, began)
	}
	return l, nil
}

// did notes what was done with all that a lease is on.
func (l *lease) did(verb string, began int64) {
	for _, e := range l.granted {
		for rank := range uint32(numRanks) {
			l.n.r.model.did(Piece{e, rank}, act{verb: verb}, began)
		}
	}
}

// doubt ends what a lease promises: the others gave its host up, or may have.
func (l *lease) doubt() {
	l.did(ended, l.n.r.model.tick())
	l.granted, l.doubted = nil, true
}

// Release ends the lease.
func (l *lease) Release() {
	began := l.n.r.model.tick()
	l.Lease.Release()
	l.did(ended, began)
}

// runDiscard discards a run of keys. An entry that was removed is no hit until it is stored again, and none that a
// lease has is removed: its loads would fail.
func (n operator) runDiscard(op Op) (string, error) {
	of := parsePiece(op.get("entry"))
	results, err := n.discard(of.Entry, int(op.number("n")))
	if err != nil {
		return "", err
	}
	for i, result := range results {
		e := Entry{of.Space, of.Key + uint64(i)}
		if there, err := n.hit(e); err != nil {
			return "", err
		} else if there && result == store.DiscardRemoved {
			return "", fmt.Errorf("host %s: %s was discarded and is a hit", n.ID, e)
		}
	}
	return fmt.Sprint(results), nil
}

func (n *node) discard(from Entry, count int) ([]store.DiscardResult, error) {
	var keys []uint64
	for i := range uint64(count) {
		keys = append(keys, from.Key+i)
	}
	began := n.r.model.tick()
	results, err := n.store.Discard(from.Space, keys)
	if err != nil {
		return nil, fmt.Errorf("host %s: discarding %d keys from %s: %w", n.ID, count, from, err)
	}
	for i, key := range keys {
		// What goes from a shared root is a hit of the others until its evictor has asked them.
		for rank := range uint32(numRanks) {
			if k := &n.r.h.Kind; k.exact() && k.hosts == 1 && results[i] == store.DiscardRemoved {
				n.r.model.did(Piece{Entry{from.Space, key}, rank}, act{verb: discarded}, began)
			}
		}
	}
	return results, nil
}

// loadAll loads of the i-th hit of a lease the rank that ranks says.
func (n *node) loadAll(l *lease, ranks string) {
	for i := range min(l.Hits(), len(ranks)) {
		n.load(l, i, uint32(ranks[i]-'0'))
	}
}

func (n *node) load(l *lease, i int, rank uint32) {
	of := Piece{l.keys[i], rank}
	n.r.loads.Add(1)
	began := n.r.model.tick()
	payload, err := l.Load(i, rank)
	n.r.ended.Add(1)
	if err == nil {
		err = n.r.model.served(of, payload, began)
	} else {
		err = n.judge(l, of, err)
	}
	if err != nil {
		n.r.report(fmt.Errorf("host %s: %w", n.ID, err))
	}
}

// judge says whether a load may fail. The engine computes its blocks again.
func (n *node) judge(l *lease, of Piece, failed error) error {
	r, k := n.r, &n.r.h.Kind
	if n.armed && errors.Is(failed, faultfs.ErrInjected) {
		return nil // its process is dying
	}
	if k.many { // somebody else may have stored it again meanwhile
		excused := r.rules != nil && errors.Is(failed, faultfs.ErrInjected)
		if !isLoss(failed) && !errors.Is(failed, store.ErrRootOut) && !excused {
			return fmt.Errorf("loading piece %s: %w", of, failed)
		}
		return nil
	}
	if k.lives {
		excused := isAny(failed, faultfs.ErrPowerLost, fs.ErrNotExist)
		if n.owed.owes(of.Entry) && !excused {
			return fmt.Errorf("piece %s was durable, and loading it fails: %w", of, failed)
		}
		return nil
	}
	if !r.model.isDamaged(of.Entry) && !l.lost[of.Entry] && r.rules == nil && !k.power && !l.doubted {
		return fmt.Errorf("loading piece %s: %w", of, failed)
	}
	if errors.Is(failed, faultfs.ErrInjected) { // of the device, which may answer again: no verdict on the entry
		return nil
	}
	if !isLoss(failed) || l.doubted && errors.Is(failed, store.ErrGone) { // its host may have found the entry again
		return nil
	}
	if l.lost[of.Entry] { // it went before, and may have been stored again
		return nil
	}
	l.lost[of.Entry] = true
	for _, o := range n.leases {
		o.lost[of.Entry] = true
	}
	if there, err := n.hit(of.Entry); err != nil {
		return err
	} else if there && k.levels {
		return n.loadFurther(of, failed)
	} else if there {
		return fmt.Errorf("piece %s is a hit after a load failed: %w", of, failed)
	}
	if k.hosts == 1 { // other hosts do not know yet
		r.model.setDamaged(of.Entry, false)
	}
	return nil
}

// loadFurther loads a piece again after a load found the nearest copy bad: the levels behind may have copies, of which
// each is whole, or is lost as well.
func (n *node) loadFurther(of Piece, failed error) error {
	for range n.r.h.Kind.roots - 1 {
		l, err := n.lookup(of.Entry, 1, 0)
		if err != nil {
			return err
		}
		if l.Hits() == 0 {
			l.Release()
			return nil
		}
		began := n.r.model.tick()
		payload, err := l.Load(0, of.Rank)
		l.Release()
		if err == nil {
			return n.r.model.served(of, payload, began)
		}
		if !isLoss(err) {
			return nil
		}
		if there, err := n.hit(of.Entry); err != nil || !there {
			return err
		}
	}
	return fmt.Errorf("piece %s is a hit after a load from every level failed: %w", of, failed)
}

// readAll reads every piece that is there. After a crash those of entries too that lack the other one: damage is to be
// found before the entry is complete again.
func (n *node) readAll() error {
	for space := range namespaces {
		for key := range uint64(numKeys) {
			for rank := range uint32(numRanks) {
				ranks := uint64(0)
				if n.r.h.Kind.lives {
					ranks = 1 << rank
				}
				l, err := n.lookup(Entry{space, key}, 1, ranks)
				if err != nil {
					return err
				}
				if l.Hits() == 1 {
					n.load(l, 0, rank)
				}
				l.Release()
			}
		}
	}
	return n.r.reported()
}
