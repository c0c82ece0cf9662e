package sim

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/plugins/lru"
)

// eventLog is lru and keeps the events.
type eventLog struct {
	*lru.Policy
	events []abi.Event
}

func (r *eventLog) Events(batch []abi.Event) {
	r.events = append(r.events, batch...)
	r.Policy.Events(batch)
}

// The simulator has its own tables for the host's side of a policy. Its events keep the contract all the same.
func TestEventsKeepTheContract(t *testing.T) {
	w := generated(t, 500)
	r := &eventLog{}
	m := policy.NativeModule("eventLog", []abi.Role{abi.RoleEvict}, func(i guest.Info) (_ any, err error) {
		r.Policy, err = lru.New(i)
		return r, err
	})
	res, err := w.Run(t.Context(), m, nil, 60, Options{})
	testenv.OK(t, err)
	if res.Evictions == 0 || len(r.events) == 0 {
		t.Fatalf("%d evictions and %d events: nothing to check", res.Evictions, len(r.events))
	}
	testenv.NoError(t, policytest.CheckEvents(r.events))
}
