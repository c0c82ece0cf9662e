package replay

// dealer deals the requests of a trace to N sessions so that a conversation stays in one session, in order.
//
// A request goes to the session that was the first to have the deepest of its known leading blocks. If that block has
// sharedBy different successors already, it counts as part of a shared prompt. The request then starts a new
// conversation, as it does when no block is known, and goes to the session with the least work so far.
type dealer struct {
	blocks map[uint64]dealt
	work   []int64
}

type dealt struct {
	session  int32
	children int32
}

// sharedBy is the number of different successors from which a block counts as part of a shared prompt.
const sharedBy = 4

func newDealer(n int) *dealer {
	return &dealer{blocks: map[uint64]dealt{}, work: make([]int64, n)}
}

// Deal returns the session of the next request.
func (d *dealer) Deal(ids []uint64) int {
	if len(d.work) == 1 {
		return 0
	}
	known := 0
	for known < len(ids) {
		if _, ok := d.blocks[ids[known]]; !ok {
			break
		}
		known++
	}
	session := -1
	if known > 0 {
		if b := d.blocks[ids[known-1]]; b.children < sharedBy {
			session = int(b.session)
		}
	}
	if session < 0 {
		session = 0
		for i, w := range d.work {
			if w < d.work[session] {
				session = i
			}
		}
	}
	if known > 0 && known < len(ids) {
		b := d.blocks[ids[known-1]]
		b.children++
		d.blocks[ids[known-1]] = b
	}
	for i, id := range ids[known:] {
		b := dealt{session: int32(session), children: 1}
		if known+i == len(ids)-1 {
			b.children = 0
		}
		d.blocks[id] = b
	}
	d.work[session] += int64(len(ids)) + 1
	return session
}
