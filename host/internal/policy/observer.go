package policy

import (
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Call is one call into a guest: a batch of events, with a question for victims or without, a batch of candidates, a query for a
// path, or a geometry.
type Call struct {
	Events     []abi.Event
	Ask        *abi.Ask
	Victims    []uint32
	Candidates []abi.Candidate
	Admitted   []bool
	Query      *abi.PlaceQuery
	Roots      []abi.RootFacts // as the guest was told
	Path       []byte          // empty: the built-in name
	Root       uint32
	Geometry   *abi.LayoutHeader
	Segments   []abi.Segment
	Fuel       uint64
	Allowed    uint64
	Time       time.Duration
	Err        error // for what the call or its answer was refused
}

// Observer gets each call of a role after it was made, for authors of policies who look at single decisions. What a Call
// holds is valid until it returns. An error ends the role.
type Observer func(*Call) error

// watch makes a call and passes it on.
func (o Observer) watch(c *Call, stats func() Stats, call func() error) error {
	before := stats()
	c.Err = call()
	after := stats()
	c.Fuel, c.Time = after.Fuel-before.Fuel, after.Time-before.Time
	if err := o(c); c.Err == nil {
		return err
	}
	return c.Err
}
