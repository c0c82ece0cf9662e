package policy

import (
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Call is one call into a guest: a batch of events, possibly with a question for victims; a batch of candidates; a
// query for a path; or a geometry.
type Call struct {
	Events     []abi.Event
	Ask        *abi.Ask
	Victims    []uint32
	Candidates []abi.Candidate
	Admitted   []bool
	Query      *abi.PlaceQuery
	Roots      []abi.RootFacts // the facts that the guest has
	Path       []byte          // the answer; empty: the built-in name
	Root       uint32
	Geometry   *abi.LayoutHeader
	Segments   []abi.Segment
	Fuel       uint64
	Allowed    uint64
	Time       time.Duration
	Err        error // the refusal of the call or of its answer; nil if there was none
}

// Observer gets each call of a role after its end, for authors of policies that inspect single decisions. The fields of
// a Call are valid until the observer returns. An error ends the role.
type Observer func(*Call) error

// watch makes a call and passes it to the observer.
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
