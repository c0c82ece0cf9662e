package policy

import (
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Call is one call into a guest: a batch of events, possibly with a question for victims; a batch of candidates; or a
// query for a path.
type Call struct {
	Events     []abi.Event     `json:",omitempty"`
	Ask        *abi.Ask        `json:",omitempty"`
	Victims    []uint32        `json:",omitempty"`
	Candidates []abi.Candidate `json:",omitempty"`
	Admitted   []bool          `json:",omitempty"`
	Query      *abi.PlaceQuery `json:",omitempty"`
	Roots      []abi.RootFacts `json:",omitempty"` // the facts that the guest has
	Path       []byte          `json:",omitempty"` // the answer; empty: the built-in name
	Root       uint32          `json:",omitempty"`
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
