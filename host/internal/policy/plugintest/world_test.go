package plugintest

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// The world has its own tables, because it does more than hosts do. Its events keep the contract all the same.
func TestWorldKeepsTheContract(t *testing.T) {
	for seed := range uint64(20) {
		var events []abi.Event
		w := newWorld(seed, 40)
		w.emit = func(ev abi.Event) { events = append(events, ev) }
		w.ask = func(ask abi.Ask) (victims []uint32) {
			for slot, n := range w.slots {
				if n >= 0 && w.nodes[n].pins == 0 && len(victims) < int(ask.MaxVictims) {
					victims = append(victims, uint32(slot))
				}
			}
			return victims
		}
		w.fill(10)
		for range 200 {
			w.round()
		}
		if len(events) < 1000 || w.named == 0 {
			t.Fatalf("seed %d: %d events, %d victims: nothing to check", seed, len(events), w.named)
		}
		if err := policytest.CheckEvents(events); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}
