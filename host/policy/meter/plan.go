package meter

import "fmt"

// charges says where a body pays and how much: at its entry, and behind the bytes [0, at) of its code.
type charges struct {
	entry uint64
	rest  []charge
}

type charge struct {
	at    int
	units uint64
}

// planner walks a body and adds up, for each region, what its instructions cost. Region 0 is the function's own.
type planner struct {
	r       reader
	regions []region
	open    []frame
	jumps   []int // regions of dispatch loops that stand in region 0
	plain   bool  // besides them, region 0 holds plain instructions and blocks only
}

type region struct {
	at    int // where it pays
	units uint64
	kind  kind
	// Of a segment: the dispatch loop's region, and how control can come besides by the jump.
	loop   int
	falls  bool // from the segment before
	joined bool // by a branch from any segment before
}

type kind uint8

const (
	loop     kind = iota // pays at its head
	jump                 // a dispatch loop's: pays at its head for the jump and for its segments' allowance
	segment              // of a dispatch loop: pays when its allowance does not cover it
	deadCode             // cannot be reached, pays nothing
)

// frame is a block that the walk is in.
type frame struct {
	region int
	loop   int  // the dispatch loop's region
	bound  bool // a segment of a dispatch loop begins behind its end
	joined bool // something besides the jump branches to its end
	ended  bool // the code before cannot go on from here: it branched, returned or trapped
}

// A dispatch loop does nothing but jump: loop, blocks, local.get, br_table to one of those blocks' ends. That is how
// compilers spell control flow that has no structure; nearly every function of Go is one. If each turn paid for the whole
// body, it would pay a hundred times for what it executes. So the body is cut into segments at the blocks' ends. A turn
// pays for the jump and an allowance; a segment that could be reached with too little of it left pays for itself. Small
// segments, which are most, then cost no charge of their own.
const (
	jumpCost  = 10  // of local.get and br_table; blocks are labels and leave no code behind
	allowance = 256 // most that a turn pays in advance
	foldCost  = 64  // most that a function pays late
)

func plan(code []byte, locals uint64) (*charges, error) {
	p := planner{r: reader{b: code}, regions: []region{{units: 1 + locals}}, open: []frame{{}}, plain: true}
	for len(p.open) > 0 {
		in := p.r.next()
		if p.r.err != nil {
			return nil, p.r.err
		}
		p.step(in)
	}
	if !p.r.done() {
		return nil, fmt.Errorf("%w: %d bytes after a function's end", ErrMalformed, len(code)-p.r.at)
	}
	return p.settle(), nil
}

func (p *planner) step(in instruction) {
	top := len(p.open) - 1
	f := &p.open[top]
	p.regions[f.region].units += in.cost()
	if in.op == opUnreachable || in.op == opBranch || in.op == opBranchTable || in.op == opReturn {
		f.ended = true
	}
	if f.region == 0 && in.op != opBlock && in.op != opLoop && in.op != opEnd && !in.plain() {
		p.plain = false
	}
	switch in.op {
	case opBranch, opBranchIf, opBranchTable:
		p.join(in)
	case opBlock, opIf:
		p.open = append(p.open, frame{region: f.region})
	case opLoop:
		if p.dispatch(in.hi) {
			break
		}
		p.plain = p.plain && f.region != 0
		p.open = append(p.open, frame{region: p.begin(region{at: in.hi})})
	case opEnd:
		p.end(in.hi)
	}
}

// join notes where a branch leads.
func (p *planner) join(in instruction) {
	labels, r := uint32(0), reader{b: p.r.b, at: in.lo + 1}
	if in.op == opBranchTable {
		labels = r.count()
	}
	for range labels + 1 {
		if depth := r.u32(); uint64(depth) < uint64(len(p.open)) {
			p.open[len(p.open)-1-int(depth)].joined = true
		}
	}
}

// end closes a block. Nothing is known of how its code ends when it is an ordinary one: something may branch to its end.
func (p *planner) end(at int) {
	f := p.open[len(p.open)-1]
	p.open = p.open[:len(p.open)-1]
	if f.bound {
		outer := &p.open[len(p.open)-1]
		outer.region = p.begin(region{at: at, kind: segment, loop: f.loop, falls: !f.ended, joined: f.joined})
		outer.ended = false
	}
}

func (p *planner) begin(r region) int {
	p.regions = append(p.regions, r)
	return len(p.regions) - 1
}

// dispatch looks whether the loop whose head ends here is one that only jumps, and if so opens its blocks.
func (p *planner) dispatch(at int) bool {
	ahead, blocks := p.r, 0
	in := ahead.next()
	for ; in.op == opBlock && ahead.err == nil; in = ahead.next() {
		blocks++
	}
	if blocks == 0 || in.op != opLocalGet {
		return false
	}
	if in = ahead.next(); in.op != opBranchTable || ahead.err != nil {
		return false
	}
	targets := reader{b: ahead.b, at: in.lo + 1}
	for range targets.count() + 1 {
		if uint64(targets.u32()) >= uint64(blocks) {
			return false // around the loop or out of it
		}
	}
	if p.open[len(p.open)-1].region == 0 {
		p.jumps = append(p.jumps, len(p.regions))
	}
	head := p.begin(region{at: at, units: jumpCost, kind: jump})
	dead := p.begin(region{kind: deadCode})
	p.open = append(p.open, frame{region: dead})
	for range blocks {
		p.open = append(p.open, frame{region: dead, bound: true, loop: head})
	}
	p.open[len(p.open)-1].ended = true
	p.r = ahead
	return true
}

// settle decides where to pay. A function that does no more than enter a dispatch loop pays for that at the loop's head.
func (p *planner) settle() *charges {
	due := map[int]uint64{}  // of a dispatch loop: the most that its allowance covered so far
	owed := map[int]uint64{} // at the end of its latest segment
	pays := make([]bool, len(p.regions))
	for i := range p.regions {
		r := &p.regions[i]
		pays[i] = r.kind == loop || r.kind == jump
		if r.kind != segment {
			continue
		}
		before := uint64(0)
		switch {
		case r.joined:
			before = due[r.loop]
		case r.falls:
			before = owed[r.loop]
		}
		if pays[i] = before+r.units > allowance; !pays[i] {
			before += r.units
		}
		owed[r.loop] = before
		due[r.loop] = max(due[r.loop], before)
	}
	for head, units := range due {
		p.regions[head].units += units
	}
	out := &charges{entry: p.regions[0].units}
	if p.plain && len(p.jumps) == 1 && out.entry <= foldCost {
		p.regions[p.jumps[0]].units += out.entry
		out.entry = 0
	}
	for i, r := range p.regions {
		if i > 0 && pays[i] {
			out.rest = append(out.rest, charge{r.at, r.units})
		}
	}
	return out
}
