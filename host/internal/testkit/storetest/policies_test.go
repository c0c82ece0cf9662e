package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/plugins/blockmajor"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/lru"
)

// policySet opens the policies of histories and counts those that stores still have.
type policySet struct {
	opt     policy.Options
	given   atomic.Int64
	back    atomic.Int64
	problem func(error)
	seed    atomic.Uint64 // of place policies that draw
}

// role opens the policy of a name for a role. An empty name is the built-in one. The caller must release the handle; an
// empty label is the module's name.
func (s *policySet) role(role abi.Role, name, label string) (*policy.Handle, error) {
	var m *policy.Module
	var config policy.Config
	var err error
	switch role {
	case abi.RoleEvict:
		m, err = s.evictor(name)
	case abi.RolePlace:
		m, config, err = s.placer(name)
	case abi.RoleLayout:
		m = policy.Builtin(role)
		if name == "blocks" {
			m = native(name, role, func(i guest.Info) (any, error) { return blockmajor.New(i) })
		}
	case abi.RoleAdmit:
		part := uint64(0)
		if name == "some" {
			part = 1
		}
		m = native(name, role, func(guest.Info) (any, error) { return admitter{part}, nil })
	}
	if err != nil {
		return nil, err
	}
	s.given.Add(1)
	return policy.NewHandle(m, label, config, func(_ *policy.Module, err error) {
		if err != nil {
			s.problem(fmt.Errorf("closing policy %s: %w", name, err))
		}
		s.back.Add(1)
	}), nil
}

func native(name string, role abi.Role, open func(guest.Info) (any, error)) *policy.Module {
	return policy.NativeModule(name, []abi.Role{role}, open)
}

// module opens a first-party policy.
func (s *policySet) module(name string) (*policy.Module, error) {
	return policy.Open(context.Background(), name, s.opt)
}

// evictor opens NAME:SEED.
func (s *policySet) evictor(text string) (*policy.Module, error) {
	name, tail, _ := strings.Cut(text, ":")
	seed, err := strconv.ParseUint(tail, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: evict policy %q", ErrSyntax, text)
	}
	switch name {
	case "lru", "fifo":
		return s.module(name)
	case "native-lru":
		return native(name, abi.RoleEvict, func(i guest.Info) (any, error) { return lru.New(i) }), nil
	case "native-fifo":
		return native(name, abi.RoleEvict, func(i guest.Info) (any, error) { return fifo.New(i) }), nil
	case "replaying":
		m := native(name, abi.RoleEvict, func(i guest.Info) (any, error) {
			p, err := lru.New(i)
			return &replaying{Policy: p}, err
		})
		return m.KeepState("replaying/1"), nil
	case "liar", "miser", "wrecker":
		return native(name, abi.RoleEvict, func(i guest.Info) (any, error) {
			p, err := lru.New(i)
			return &rogue{Policy: p, how: name, slots: i.MaxSlots, rng: rand.New(rand.NewPCG(seed, 4))}, err
		}), nil
	}
	return nil, fmt.Errorf("%w: evict policy %q", ErrSyntax, text)
}

// replaying is lru, and hands all events that it got to its successor, which plays them again.
type replaying struct {
	*lru.Policy
	events []abi.Event
}

func (e *replaying) Events(batch []abi.Event) {
	e.events = append(e.events, batch...)
	e.Policy.Events(batch)
}

func (e *replaying) Save(dst []byte, _ int) ([]byte, error) {
	state := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(e.events))), len(e.events)*abi.EventSize)
	return append(dst, state...), nil
}

func (e *replaying) Load(state []byte) error {
	events := make([]abi.Event, len(state)/abi.EventSize)
	copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(events))), len(state)), state)
	e.Events(events)
	return nil
}

// rogue is lru, but for its answers: a liar names slots that do not exist or must not be evicted; a miser names none
// now and then; a wrecker answers what no policy may, and is replaced.
type rogue struct {
	*lru.Policy
	how   string
	slots uint32
	rng   *rand.Rand
}

func (r *rogue) Victims(ask abi.Ask, dst []uint32) int {
	n := r.Policy.Victims(ask, dst)
	switch {
	case r.how == "liar":
		seen := map[uint32]bool{}
		for i := range dst[:min(n+2, len(dst))] {
			if i >= n || r.rng.IntN(2) == 0 {
				dst[i] = r.rng.Uint32N(r.slots)
			}
			if seen[dst[i]] {
				return i
			}
			seen[dst[i]] = true
		}
		return min(n+2, len(dst))
	case r.how == "miser" && r.rng.IntN(3) == 0:
		return 0
	case r.how == "wrecker" && r.rng.IntN(5) == 0:
		return len(dst) + 1
	}
	return n
}

var errRogue = errors.New("a rogue keeps its state to itself")

// Save and Load hide lru's.
func (r *rogue) Save([]byte, int) ([]byte, error) { return nil, errRogue }
func (r *rogue) Load([]byte) error                { return errRogue }

func (s *policySet) placer(name string) (*policy.Module, policy.Config, error) {
	switch name {
	case "collider", "mute", "fickle", "thief":
		return native(name, abi.RolePlace, func(i guest.Info) (any, error) {
			p, err := fanout.New(i)
			return &roguePlacer{fanout: p, how: name, rng: rand.New(rand.NewPCG(s.seed.Add(1), 5))}, err
		}), nil, nil
	}
	m, err := s.module("fanout")
	return m, policy.Config{fanout.ConfigWidths: name}, err
}

// colliderDir is where a collider puts all pieces.
const colliderDir = "heap"

// roguePlacer gives some keys the name of others (a collider), or one that leads out of the root (a mute one), or a new one
// each time that it is asked (a fickle one), or one where other pieces have their built-in names (a thief).
type roguePlacer struct {
	fanout *fanout.Policy
	how    string
	rng    *rand.Rand
}

// Namespace tells fanout.
func (r *roguePlacer) Namespace(id uint32, text string) { r.fanout.Namespace(id, text) }

func (r *roguePlacer) Place(q *abi.PlaceQuery, roots []abi.RootFacts, dst []byte) ([]byte, uint32) {
	switch r.how {
	case "collider":
		return fmt.Appendf(dst, "%s/%02x_r%d.kv", colliderDir, q.Key[0]%8, q.Rank), abi.None
	case "fickle":
		for range r.rng.IntN(4) {
			dst = fmt.Appendf(dst, "%c/", 'a'+r.rng.IntN(3))
		}
		return fmt.Appendf(dst, "%x", r.rng.Uint32N(64)), abi.None
	case "thief":
		other := *q
		other.Key[0], other.Rank = byte(r.rng.Uint32()), r.rng.Uint32N(2)
		path, _ := r.fanout.Place(&other, roots, dst)
		if cut := r.rng.IntN(4); cut > 0 {
			at := len(dst)
			for range cut {
				if next := bytes.IndexByte(path[at:], '/'); next >= 0 {
					at += next + 1
				}
			}
			path = path[:at-1]
		}
		return path, abi.None
	}
	if q.Key[0]%3 == 0 {
		return append(dst, "../../out.kv"...), abi.None
	}
	return r.fanout.Place(q, roots, dst)
}

// admitter refuses part of five keys.
type admitter struct{ part uint64 }

func (a admitter) Admit(batch []abi.Candidate, dst []bool) {
	for i := range batch {
		dst[i] = batch[i].Key%5 >= a.part
	}
}
