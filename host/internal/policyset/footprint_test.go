package policyset

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// What an entry takes at most in policies of each kind: one list, ghosts and a ring, a heap, segments.
var entryBytes = map[string]uint64{"lru": 22, "lirs": 100, "gdsf": 80, "prefix": 104}

// The memory of an evict policy comes with the entries of its root, not with the slots that it is told of: a root of
// 200 TiB takes what a small one takes while it is empty.
func TestMemoryComesWithEntries(t *testing.T) {
	const slots, entries = 200 << 20, 100_000
	for name, most := range entryBytes {
		t.Run(name, func(t *testing.T) {
			m, err := policy.Open(t.Context(), filepath.Join(policytest.Dir(t, name), name+".wasm"), policy.Options{
				Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Time: time.Minute}, // a busy machine changes no memory
			})
			testenv.OK(t, err)
			defer m.Close(t.Context())
			e, err := m.NewEvict(t.Context(), policy.EvictOptions{MaxSlots: slots, Capacity: slots << 20, Seed: 1})
			testenv.OK(t, err)
			defer e.Close()
			empty := e.Stats().Memory
			if empty > 32<<20 {
				t.Errorf("%d MiB when nothing is there", empty>>20)
			}
			for slot := range uint32(entries) {
				ev := abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Key: uint64(slot) + 1, Size: 256, Request: slot, Time: uint64(slot) << 20}
				if err := e.Event(ev); err != nil {
					t.Fatalf("entry %d: %v", slot, err)
				}
				ev.Op, ev.Slot = abi.OpRequestEnd, abi.None
				if err := e.Event(ev); err != nil {
					t.Fatalf("entry %d: %v", slot, err)
				}
			}
			testenv.OK(t, e.Flush())
			f, err := footprintOf(t.Context(), m, policy.EvictOptions{MaxSlots: slots, Capacity: slots << 20, Seed: 1})
			testenv.OK(t, err)
			t.Logf("%d KiB when empty, %d bytes for an entry, of a limit of %d MiB for %d entries", empty>>10, f.Entry, f.Limit>>20, f.Fits(slots))
			if f.Entry == 0 || f.Entry > most {
				t.Errorf("%d bytes for an entry, want at most %d", f.Entry, most)
			}
			if grew := e.Stats().Memory - empty; grew > entries*f.Entry+1<<20 || grew < entries*8 {
				t.Errorf("%d KiB for %d entries, of which each takes %d bytes", grew>>10, entries, f.Entry)
			}
		})
	}
}
