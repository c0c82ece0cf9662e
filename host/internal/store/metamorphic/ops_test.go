package metamorphic

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
	args   []argument
	closed bool // it makes sense on a host that is closed
	run    func(n operator, op Op) (string, error)
}

// argument is what a verb takes.
type argument struct {
	name     string
	valid    func(string) bool
	optional bool
}

// valid are the checks of arguments, by type.
var valid = map[string]func(string) bool{
	"number": isNumber,
	"bool":   func(s string) bool { return s == "true" || s == "false" },
	"entry":  func(s string) bool { _, ok := parsePiece(s, 2); return ok },
	"piece":  func(s string) bool { _, ok := parsePiece(s, 3); return ok },
	"call":   func(s string) bool { _, _, ok := parsePair(s); return ok }, // its number and a seed
	"policy": func(s string) bool { _, tail, _ := strings.Cut(s, ":"); return isNumber(tail) },
	"text":   func(s string) bool { return s != "" },
	"ranks":  func(s string) bool { return strings.Trim(s, "01") == "" },
	"task":   func(s string) bool { _, ok := taskNamed(s); return ok },
	"how":    func(s string) bool { return s == "remove" || s == "cut" || s == "flip" },
}

func isNumber(s string) bool { _, err := strconv.ParseUint(s, 10, 64); return err == nil }

// parsePair reads two numbers: NUMBER:SEED.
func parsePair(text string) (n, seed uint64, ok bool) {
	head, tail, _ := strings.Cut(text, ":")
	n, err := strconv.ParseUint(head, 10, 64)
	if err != nil {
		return 0, 0, false
	}
	seed, err = strconv.ParseUint(tail, 10, 64)
	return n, seed, err == nil
}

// newVerb makes a verb of a list of arguments, each a name and a type; a name that ends in ? is of an optional one.
func newVerb(args string, run func(operator, Op) (string, error)) verb {
	v := verb{run: run}
	for text := range strings.SplitSeq(args, ",") {
		name, kind, found := strings.Cut(strings.TrimSpace(text), " ")
		if !found {
			continue // no arguments
		}
		name, optional := strings.CutSuffix(name, "?")
		v.args = append(v.args, argument{name, valid[kind], optional})
	}
	return v
}

// whileClosed is the verb for hosts that are closed, too.
func (v verb) whileClosed() verb {
	v.closed = true
	return v
}

var verbs = map[string]verb{
	"Open":       newVerb("evict? policy, place? text, unplug? call", operator.runOpen).whileClosed(),
	"Close":      newVerb("unplug? call", operator.runClose),
	"Crash":      newVerb("", operator.runCrash),
	"PowerLoss":  newVerb("seed number", operator.runPowerLoss).whileClosed(),
	"Arm":        newVerb("call number, power? bool, seed? number", operator.runArm),
	"Store":      newVerb("entry entry", operator.runStore),
	"Begin":      newVerb("put number, piece piece", operator.runBegin),
	"Publish":    newVerb("put number", operator.runPublish),
	"Abort":      newVerb("put number, written bool", operator.runAbort),
	"Lookup":     newVerb("entry entry, n number, ranks ranks, hold? number", operator.runLookup),
	"Release":    newVerb("lease number, ranks? ranks", operator.runRelease),
	"Discard":    newVerb("entry entry, n number", operator.runDiscard),
	"EndRequest": newVerb("", operator.runEndRequest),
	"Maintain":   newVerb("root number, task task", operator.runMaintain),
	"Swap":       newVerb("role text, policy text", operator.runSwap),
	"Damage":     newVerb("file number, how how, at number, bytes number", operator.runDamage),
	"Turns":      newVerb("n number", operator.runTurns),
	"Sleep":      newVerb("n number", operator.runSleep),
	"Pause":      newVerb("entry entry, step bool, call number, asleep number, awake number, fill text", operator.runPause),
	"Rush":       newVerb("clients text, swap policy", operator.runRush),
	"Finish":     newVerb("evict? policy, place? text", operator.runFinish).whileClosed(),
}

// taskNames are the tasks of [store.Task] that histories ask for, in their order.
var taskNames = []string{"retry", "probe"}

func taskNamed(name string) (store.Task, bool) {
	for i, n := range taskNames {
		if n == name {
			return []store.Task{store.RetryRemovals, store.Probe}[i], true
		}
	}
	return 0, false
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
	n.arm(op.number("call"), op.get("power") == "true" && n.machine != nil, op.number("seed"))
	return "", nil
}

// begin reserves room for a piece.
func (n *node) begin(of Piece) (*put, error) {
	p, err := n.store.Begin(context.Background(), of)
	if err != nil {
		return nil, err
	}
	return &put{Put: p, of: of, version: n.r.model.begin(of)}, nil
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
	n.r.model.written(p.of, p.version)
	err := p.Publish(context.Background())
	if err == nil {
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
		if err == nil && n.r.h.Kind.lives {
		}
		results = append(results, fmt.Sprint(err))
	}
	return strings.Join(results, ", ")
}

func (n operator) runStore(op Op) (string, error) {
	of, _ := parsePiece(op.get("entry"), 2)
	return n.storeEntry(of.Entry), nil
}

func (n operator) runBegin(op Op) (string, error) {
	of, _ := parsePiece(op.get("piece"), 3)
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
	task, _ := taskNamed(op.get("task"))
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
