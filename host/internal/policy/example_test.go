package policy_test

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// An evict policy is told what is stored and used, and names victims when space is needed. The built-in one is lru; a
// module of [policy.Open] is used in the same way.
func ExampleModule_NewEvict() {
	m := policy.Builtin(abi.RoleEvict)
	evict, err := m.NewEvict(context.Background(), policy.EvictOptions{MaxSlots: 16, Capacity: 1 << 20})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer evict.Close()
	for slot := range uint32(3) {
		err = evict.Event(abi.Event{
			Op: abi.OpInsert, Slot: slot, Parent: abi.None, Key: uint64(slot) + 1, Size: 1, Time: uint64(slot),
		})
		if err != nil {
			fmt.Println(err)
			return
		}
	}
	if err := evict.Event(abi.Event{Op: abi.OpTouch, Slot: 0, Parent: abi.None, Key: 1, Size: 1, Time: 3}); err != nil {
		fmt.Println(err)
		return
	}
	victims := make([]uint32, 4)
	n, err := evict.Victims(abi.Ask{Bytes: 2 * abi.SizeUnit, MaxVictims: 4, Tenant: abi.None}, victims)
	fmt.Println(victims[:n], err)
	// Output: [1 2] <nil>
}

// A handle counts the users of a module. The last one closes it.
func ExampleHandle() {
	h := policy.NewHandle(policy.Builtin(abi.RoleEvict), "main", nil, func(m *policy.Module, err error) {
		fmt.Println("closed", m.Name(), err)
	})
	user := h.Acquire()
	h.Release()
	fmt.Println("still in use as", user.Label)
	user.Release()
	// Output:
	// still in use as main
	// closed lru <nil>
}
