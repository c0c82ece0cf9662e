package policy

import (
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Stats count the calls into a role's guests, and their cost.
type Stats struct {
	Role    abi.Role
	Module  string
	Digest  string
	Calls   uint64        // calls into the guest
	Records uint64        // events, candidates, queries or planes handed over
	Time    time.Duration // spent in the guest; short calls are sampled
	Fuel    uint64        // about one unit per instruction; 0 for a native guest
	Faults  uint64
	Memory  uint64 // bytes of its guests' memory now; 0 for a native guest
	Builtin bool   // the built-in policy answers now
}

// Add adds the counts of an earlier instance.
func (s *Stats) Add(o Stats) {
	s.Calls, s.Records, s.Time = s.Calls+o.Calls, s.Records+o.Records, s.Time+o.Time
	s.Fuel, s.Faults = s.Fuel+o.Fuel, s.Faults+o.Faults
}

func stats(u *sandbox.Usage, m *Module, role abi.Role) Stats {
	return Stats{
		Role: role, Module: m.name, Digest: m.digest, Calls: u.Calls.Load(), Records: u.Records.Load(), Time: time.Duration(u.Nanos.Load()), Fuel: u.Fuel.Load(),
		Faults: u.Faults.Load(), Memory: u.Memory.Load(), Builtin: u.Builtin.Load(),
	}
}
