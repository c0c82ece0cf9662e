package meter

import (
	"fmt"
	"slices"
)

// charges are the charges of a body, with their places: at its entry, and after the bytes [0, at) of its code.
type charges struct {
	entry charge
	rest  []charge
	work  work
}

// charge is a place in the code that lowers the counter, checks it, or both.
type charge struct {
	at    int
	units uint64
	check check
}

type check uint8

const (
	never  check = iota // no check: another one follows soon
	after               // check after the payment
	before              // check before: it pays, and then returns here
)

// planner walks a body and sums the cost of the instructions of each region. Region 0 is the function's own.
type planner struct {
	r       reader
	regions []region
	open    []frame
	jumps   []int // regions of dispatch loops directly in region 0
	plain   bool  // except for jumps, region 0 has plain instructions and blocks only
	calls   bool  // the function calls others
	frame   frameEstimate
	carried uint64 // upper bound of the values that branches carry to their targets
}

type region struct {
	at    int // the place where it pays
	units uint64
	kind  kind
	bare  bool // a loop without operands, so a branch to its head needs none
	// For a segment: loop is the dispatch loop's region, and from are the regions that control can come from, in
	// addition to the jump.
	loop int
	from []int
	head bool // the jump leads here and to few other segments, so this one pays for itself and for the following ones, up to the allowance
}

type kind uint8

const (
	loop     kind = iota // pays at its head
	jump                 // a dispatch loop: pays at its head for the jump and for its segments' allowance
	table                // a dispatch loop with few targets, which pay in its place
	segment              // a segment of a dispatch loop: pays if the allowance does not cover it
	deadCode             // unreachable code: pays nothing
	part                 // the code after a long stretch without a loop: pays for itself
)

// frame is an open block of the walk.
type frame struct {
	region int
	base   int   // the region at its beginning
	loop   int   // the dispatch loop's region
	bound  bool  // a segment of a dispatch loop begins at the block's end
	head   bool  // the jump leads to its end
	from   []int // regions that branch to its end, without the jump
	ended  bool  // the code before does not continue here: it branched, returned or trapped
}

// A dispatch loop only jumps: loop, blocks, local.get, br_table to the end of one of the blocks. Compilers write
// unstructured control flow in this form; nearly every function of Go has it. If each turn paid for the whole body, it
// would pay for a hundred times the executed code. So the body is cut into segments at the ends of the blocks. A turn
// pays for the jump and an allowance, and a segment that can be reached with too little of the allowance left pays for
// itself. Most segments are small, and then need no charge of their own.
const (
	jumpCost   = 10     // cost of local.get and br_table; blocks are labels without code
	allowance  = 256    // most units that a turn pays in advance
	foldCost   = 64     // most units that a function pays late
	mostAtOnce = 16_000 // most cost of a region, plus one instruction
	fewHeads   = 4      // if a jump leads to no more than a fourth of the segments, those pay in place of the jump
)

func plan(code []byte, locals uint64, types *Module) (*charges, error) {
	p := planner{r: reader{b: code}, regions: []region{{units: 1 + locals/8}}, open: []frame{{}}, plain: true}
	p.frame = frameEstimate{locals: locals, types: types}
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
	c := p.place()
	c.work = work{locals: locals, pairs: p.frame.joins * p.frame.joins, values: p.frame.values + p.carried}
	return c, nil
}

// step adds an instruction to its region. A large region ends, so that the host gets control also in code without
// loops. The next region begins in the innermost block only: a branch out of that block skips it, and pays nothing for
// it.
func (p *planner) step(in instruction) {
	top := len(p.open) - 1
	f := &p.open[top]
	if r := &p.regions[f.region]; r.units > mostAtOnce && r.kind != deadCode && in.op != opEnd && in.op != opElse {
		f.region = p.begin(region{at: in.lo, kind: part})
	}
	p.regions[f.region].units += in.cost()
	if in.op == opUnreachable || in.op == opBranch || in.op == opBranchTable || in.op == opReturn {
		f.ended = true
	}
	if f.region == 0 && in.op != opBlock && in.op != opLoop && in.op != opEnd && !in.plain() {
		p.plain = false
	}
	p.frame.add(&in, p.r.b)
	switch in.op {
	case opCall, opCallIndirect:
		p.calls = true
	case opBranch, opBranchIf, opBranchTable:
		p.join(in)
	case opBlock, opIf:
		p.open = append(p.open, frame{region: f.region, base: f.region})
	case opElse:
		f.region = f.base
	case opLoop:
		bare := p.r.b[in.hi-1] >= blockEmpty // no type or a value's type; a function's type could have parameters
		if p.dispatch(in.hi, bare) {
			break
		}
		p.plain = p.plain && f.region != 0
		r := p.begin(region{at: in.hi, bare: bare})
		p.open = append(p.open, frame{region: r, base: r})
	case opEnd:
		p.end(in.hi)
	}
}

// join records the target of a branch.
func (p *planner) join(in instruction) {
	labels, r := uint32(0), reader{b: p.r.b, at: in.lo + 1}
	if in.op == opBranchTable {
		labels = r.count(1)
	}
	p.carried += uint64(labels+1) * uint64(1+p.frame.types.mostResults)
	here := p.open[len(p.open)-1].region
	for range labels + 1 {
		if depth := r.u32(); uint64(depth) < uint64(len(p.open)) {
			f := &p.open[len(p.open)-1-int(depth)]
			if f.bound && !slices.Contains(f.from, here) {
				f.from = append(f.from, here)
			}
		}
	}
}

// end closes a block. After an ordinary block, the state of the code is unknown, since a branch may lead to its end.
func (p *planner) end(at int) {
	f := p.open[len(p.open)-1]
	p.open = p.open[:len(p.open)-1]
	if f.bound {
		outer := &p.open[len(p.open)-1]
		if !f.ended {
			f.from = append(f.from, f.region)
		}
		outer.region = p.begin(region{at: at, kind: segment, loop: f.loop, from: f.from, head: f.head})
		outer.ended = false
	}
}

func (p *planner) begin(r region) int {
	p.regions = append(p.regions, r)
	return len(p.regions) - 1
}

// dispatch opens the blocks of the loop whose head ends here, if the loop only jumps.
func (p *planner) dispatch(at int, bare bool) bool {
	j, after := dispatchLoop(p.r)
	if j == nil {
		return false
	}
	if p.open[len(p.open)-1].region == 0 {
		p.jumps = append(p.jumps, len(p.regions))
	}
	p.frame.joins += uint64(j.blocks)
	heads := make([]bool, j.blocks)
	for _, label := range j.labels {
		heads[label] = true
	}
	n := 0
	for _, head := range heads {
		if head {
			n++
		}
	}
	few := n*fewHeads <= j.blocks
	kind := jump
	if few {
		kind = table
	}
	head := p.begin(region{at: at, units: jumpCost, kind: kind, bare: bare})
	dead := p.begin(region{kind: deadCode})
	p.open = append(p.open, frame{region: dead})
	for label := j.blocks - 1; label >= 0; label-- {
		p.open = append(p.open, frame{region: dead, bound: true, loop: head, head: few && heads[label]})
	}
	p.open[len(p.open)-1].ended = true
	p.r = after
	return true
}

// place decides where to charge. A function that only enters a dispatch loop pays for that at the loop's head.
func (p *planner) place() *charges {
	n := len(p.regions)
	due := make([]uint64, n)  // for a place that pays in advance: the most that its allowance covers
	owed := make([]uint64, n) // for a segment: the most of the allowance that is used at its end
	turns := make([][]int, n) // for a segment: the places at which turns through it paid in advance
	pays := make([]bool, n)
	for i := range p.regions {
		r := &p.regions[i]
		pays[i] = r.kind == loop || r.kind == jump || r.kind == part || r.head
		if r.kind != segment {
			continue
		}
		if r.head {
			turns[i] = []int{i}
			continue
		}
		if p.regions[r.loop].kind == jump {
			turns[i] = []int{r.loop}
		}
		for _, from := range r.from {
			f := &p.regions[from]
			if f.kind != segment || f.loop != r.loop { // a loop within an unknown earlier segment
				owed[i] = allowance
				continue
			}
			owed[i] = max(owed[i], owed[from])
			for _, t := range turns[from] {
				if !slices.Contains(turns[i], t) {
					turns[i] = append(turns[i], t)
				}
			}
		}
		if pays[i] = owed[i]+r.units > allowance || len(turns[i]) == 0; pays[i] {
			continue
		}
		owed[i] += r.units
		for _, t := range turns[i] {
			due[t] = max(due[t], owed[i])
		}
	}
	for i, units := range due {
		p.regions[i].units += units
		if p.regions[i].head {
			p.regions[i].units += jumpCost
		}
	}
	if p.calls {
		p.regions[0].units += p.frame.cost()
	}
	entry := p.regions[0].units
	if p.plain && len(p.jumps) == 1 && entry <= foldCost {
		for i := range p.regions {
			if i == p.jumps[0] || p.regions[i].head {
				p.regions[i].units += entry
			}
		}
		entry = 0
	}
	return p.checked(entry, pays)
}

// Checking the counter costs more than lowering it, because the guest may be stopped there and must reload its
// registers. So small sums are charged without a check. Every loop checks at its head, and every function that calls
// others checks at its start, so that little can be spent in between.
const (
	unseenEntry = 64    // most cost of a function without calls and loops: a few times that of a call
	unseen      = 4_000 // most cost of all segments of a function's dispatch loops between two checks at the loops' heads
)

// checked decides where to check.
func (p *planner) checked(entry uint64, pays []bool) *charges {
	out := &charges{entry: charge{units: entry, check: after}}
	switch {
	case !p.calls && len(p.regions) == 1 && entry <= unseenEntry:
		out.entry.check = never
	case entry <= unseen:
		out.entry.check = before
	}
	sum := uint64(0)
	for i, r := range p.regions[1:] {
		c := charge{at: r.at, units: r.units, check: after}
		switch {
		case r.kind == table:
			c.units = 0 // the segments pay
			fallthrough
		case r.kind == loop || r.kind == jump:
			if r.bare && c.units <= unseen {
				c.check = before
			}
		case !pays[i+1]:
			continue
		case sum+r.units <= unseen:
			c.check = never
			sum += r.units
		}
		out.rest = append(out.rest, c)
	}
	return out
}
