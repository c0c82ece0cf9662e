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
