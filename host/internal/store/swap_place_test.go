package store

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/plugins/fanout"
)

// TestSwapWhilePut has a piece in flight, and a rank still to come, when its names and layout are replaced.
func TestSwapWhilePut(t *testing.T) {
	f := newFixture(t, t.TempDir(), 6, 2)
	first, err := f.store.Put(t.Context(), f.request(1, 1, 0))
	must(t, err)
	layout := policy.NativeModule("blocks", []abi.Role{abi.RoleLayout}, func(guest.Info) (any, error) {
		return blockMajor{}, nil
	})
	plan := f.space.Plan(0)
	for role, u := range map[abi.Role]*policy.Handle{
		abi.RolePlace: use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"}), abi.RoleLayout: handle(layout),
	} {
		w := Swap{From: map[abi.Role]string{abi.RolePlace: "fanout", abi.RoleLayout: "layermajor"}[role]}
		w.Policies[role] = u
		if _, err := f.store.Swap(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	if f.space.Plan(0).Digest() == plan.Digest() {
		t.Error("the layout is the old one")
	}
	must(t, write(first))
	must(t, first.Publish(t.Context()))
	must(t, f.putUnder(1, 1, 1))
	f.mustRead(1)
	f.mustPut(2)
	f.mustRead(2)
	f.restart()
	f.mustRead(1, 2)
	f.checkUsed()
}
