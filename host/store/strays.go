package store

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/shared"
)

// A stray is a file that nobody wants and that would not go. Its bytes stay in the account, and it is tried again: by the
// upkeep, and before a root that was out comes back.
type stray struct {
	name   string // or else the piece whose name the place policy did not tell:
	class  *class
	key    chunk.Key
	rank   uint32
	detour bool
	bytes  int64
	// credit that covers it: of a shared root.
	credit shared.Credit
}

// strays are a root's. mu is held by whoever unlinks one of them or takes one for a piece, files included, so that it is
// not both.
type strays struct {
	mu   sync.Mutex
	list []stray
}

// maxStrays bounds the memory: those beyond are in the account until the next start.
const maxStrays = 1 << 16

// strayed notes a file for later. Its bytes are booked by the caller.
func (r *root) strayed(s stray) {
	r.strays.mu.Lock()
	defer r.strays.mu.Unlock()
	if len(r.strays.list) < maxStrays {
		r.strays.list = append(r.strays.list, s)
	} else if s.class != nil {
		s.class.drop()
	}
}

// nameless notes a piece that cannot be found at present.
func (r *root) nameless(c *class, k *chunk.Key, rank uint32, detour bool) {
	if c.hold() {
		r.strayed(stray{class: c, key: *k, rank: rank, detour: detour, bytes: c.fileBytes()})
	}
}

// strayedLate notes a name under which an operation that was given up may yet leave something.
func (r *root) strayedLate(name string, err error) {
	if isHung(err) {
		r.strayed(stray{name: name})
	}
}

// tidy tries again to unlink what would not go.
func (r *root) tidy(ctx context.Context) {
	r.strays.mu.Lock()
	todo := len(r.strays.list)
	r.strays.mu.Unlock()
	for range todo {
		if ctx.Err() != nil || r.state() == RootOut || !r.tidyOne() {
			return
		}
	}
}

// tidyOne tries the oldest; one that will not go yet is the newest then.
func (r *root) tidyOne() bool {
	r.strays.mu.Lock()
	defer r.strays.mu.Unlock()
	if len(r.strays.list) == 0 {
		return false
	}
	s := r.strays.list[0]
	r.strays.list = r.strays.list[1:]
	name, err := s.name, error(nil)
	if s.class != nil {
		name, err = r.locatePiece(s.class, &s.key, s.rank, s.detour)
	}
	if err == nil {
		if err = r.fs.Remove(name); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		r.strays.list = append(r.strays.list, s)
		return true
	}
	r.gone(s)
	return true
}

// claimStrays takes those that have a put's target for their name, or that may have it, out of the list, so that nobody unlinks
// what the put promises. Their bytes stay booked until it is known what came of it: see settleStrays.
func (r *root) claimStrays(p *Put) (list []stray) {
	r.strays.mu.Lock()
	defer r.strays.mu.Unlock()
	for i := 0; i < len(r.strays.list); i++ {
		if s := r.strays.list[i]; s.name == p.target || s.class != nil && s.isOf(p) {
			r.strays.list = append(r.strays.list[:i:i], r.strays.list[i+1:]...)
			list, i = append(list, s), i-1
		}
	}
	return list
}

// isOf says whether a nameless stray is of a put's piece, and would have its name.
func (s *stray) isOf(p *Put) bool {
	if s.key != p.key || s.rank != p.rank || s.class.ns != p.class.ns || s.class.group != p.class.group {
		return false
	}
	if s.class.names == p.class.names {
		return true
	}
	name, err := p.root.path(s.class, &s.key, s.rank, false)
	return err != nil || name == p.target
}

// settleStrays ends claimed strays: what stands under their name is a published piece's, or else they are strays again.
func (r *root) settleStrays(list []stray, published bool) {
	for _, s := range list {
		if published {
			r.gone(s)
		} else {
			r.strayed(s)
		}
	}
}

// isStray says whether a name is one that is to go.
func (r *root) isStray(name string) bool {
	r.strays.mu.Lock()
	defer r.strays.mu.Unlock()
	return slices.ContainsFunc(r.strays.list, func(s stray) bool { return s.name == name })
}

// pledge leaves a put's credit with a stray until that goes. It is false when it has gone.
func (r *root) pledge(name string, credit shared.Credit) bool {
	r.strays.mu.Lock()
	defer r.strays.mu.Unlock()
	for i := range r.strays.list {
		if s := &r.strays.list[i]; s.name == name {
			s.credit = credit
			return true
		}
	}
	return false
}

// gone takes a stray out of the account.
func (r *root) gone(s stray) {
	if s.credit.Bytes() > 0 {
		defer r.fellows.member.Give(s.credit)
	}
	if s.class != nil {
		s.class.drop()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(s.bytes, r.stray)
	r.stray -= n
	r.used -= n
	if r.fellows != nil {
		r.fellows.flying -= s.credit.Bytes()
	}
	r.settled.Broadcast()
}
