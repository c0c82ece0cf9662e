package store

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
)

// moody is a place policy that chooses a root that there is not while it fails.
type moody struct{ fails atomic.Bool }

func (m *moody) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if m.fails.Load() {
		return dst, 77
	}
	return fmt.Appendf(dst, "moody/%x.r%d", q.Key, q.Rank), abi.None
}
func (*moody) Unplace([]byte) abi.PathIdentity { return abi.PathIdentity{} }

// TestEvictionWithoutAName: the place policy fails while an entry goes. The bytes stay in the account until it can be asked
// again.
func TestEvictionWithoutAName(t *testing.T) {
	place := &moody{}
	f := newFixture(t, t.TempDir(), 2, 1, func(c *Config) {
		c.Policies.Place.Module = policy.NativeModule("moody", []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) { return place, nil })
	})
	f.mustPut(0, 1)
	r, k := f.store.roots[0], testKey(0)
	r.mu.Lock()
	print := chunk.Fingerprint(f.space.Digest, 0, k)
	m := mark{r.x.find(print, f.space.ns.class(0).base, &k), print}
	r.mu.Unlock()
	place.fails.Store(true)
	r.drop(m, 0)
	place.fails.Store(false)
	if st := f.store.Stats().Roots[0]; st.Stray != pieceBytes || st.Used != 2*pieceBytes {
		t.Errorf("%+v", st)
	}
	r.tidy(context.Background())
	if st := f.store.Stats().Roots[0]; st.Stray != 0 || st.Used != pieceBytes {
		t.Errorf("%+v", st)
	}
	f.checkUsed()
	f.mustPut(0)
	f.mustRead(0)
}
