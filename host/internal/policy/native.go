package policy

import (
	"fmt"
	"log/slog"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/layermajor"
	"github.com/kvhost/kvhost/plugins/lru"
)

// NativeModule links a Go guest into the host. The value that make returns must have the methods of all the named
// roles. Native guests are trusted: their answers are checked like a module's, but a panic is not recovered.
func NativeModule(name string, roles []abi.Role, make func(guest.Info) (any, error)) *Module {
	m := &Module{name: name, digest: "native", make: make, log: slog.New(slog.DiscardHandler)}
	m.manifest = abi.Manifest{Name: name, Version: "native", ABI: abi.Version}
	for _, r := range roles {
		m.roles[r] = true
		m.manifest.Roles = append(m.manifest.Roles, r.String())
	}
	return m
}

// Builtin returns the policy that answers without a module: lru, [AdmitsByDefault], fanout, layermajor.
func Builtin(role abi.Role) *Module {
	b := &builtins[role]
	m := NativeModule(b.name, []abi.Role{role}, b.make)
	m.manifest.VictimsAhead = b.ahead
	if role == abi.RoleEvict {
		m.KeepState(lru.StateFormat)
	}
	return m
}

var builtins = [abi.Roles]struct {
	name string
	make func(guest.Info) (any, error)

	ahead uint32 // victims_ahead of its manifest
}{
	abi.RoleEvict:  {"lru", func(i guest.Info) (any, error) { return lru.New(i) }, 192},
	abi.RoleAdmit:  {"admit-default", func(guest.Info) (any, error) { return admitDefault{}, nil }, 0},
	abi.RolePlace:  {"fanout", func(i guest.Info) (any, error) { return fanout.New(i) }, 0},
	abi.RoleLayout: {"layermajor", func(i guest.Info) (any, error) { return layermajor.New(i) }, 0},
}

// AdmitsByDefault is the answer of the built-in admit policy.
//
// Every new entry is stored. An entry that a level evicts moves to the next level if a lookup has granted it there, or
// if it is inside a prefix: it begins one, or its parent is resident, and another entry continues it. The end of a
// prefix without a hit is mostly the end of a prompt, which no other prompt shares.
//
// A granted entry is copied to a nearer level at its second hit, or at its first if no other entry is evicted for it.
// [guest.Elsewhere] decides before these rules.
func AdmitsByDefault(c *abi.Candidate) bool {
	if admits, decided := guest.Elsewhere(c); decided {
		return admits
	}
	switch c.Kind {
	case abi.KindNew:
		return true
	case abi.KindDemotion:
		inside := c.Flags&abi.CandidateContinued != 0 && (c.ParentKey == 0 || c.Flags&abi.CandidateParentResident != 0)
		return c.Hits > 0 || inside
	case abi.KindPromotion:
		return c.Hits >= promotedAt || c.Hits > 0 && c.Flags&abi.CandidateRoom != 0 && c.From != abi.PeerLevel
	}
	return false
}

// promotedAt is the hit that copies an entry nearer if other entries are evicted for it, since a first hit may be the
// only one.
const promotedAt = 2

type admitDefault struct{}

func (admitDefault) Admit(batch []abi.Candidate, dst []bool) {
	for i := range batch {
		dst[i] = AdmitsByDefault(&batch[i])
	}
}

// native makes a guest and checks that it has the methods of the role.
func native[T any](m *Module, s *settings) (T, error) {
	var none T
	v, err := m.make(s.info())
	if err != nil {
		return none, fmt.Errorf("%w: %s: %w", ErrConfig, m.name, err)
	}
	g, ok := v.(T)
	if !ok {
		return none, fmt.Errorf("%w: %s: %T lacks the methods of role %s", ErrRole, m.name, v, s.role)
	}
	return g, nil
}
