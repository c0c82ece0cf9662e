package transfer

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// TestHungCuFileIsGivenUp: cuFile does not return. A load is staged and arrives whole, a store fails and leaves no
// piece; the route is left at once, also where it is wanted always; slot and thread come back when the call does.
func TestHungCuFileIsGivenUp(t *testing.T) {
	for _, always := range []bool{false, true} {
		t.Run(fmt.Sprint(always), func(t *testing.T) { hang(t, always) })
	}
}

func hang(t *testing.T, always bool) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(4, 4, 1, 100_000), 64, 32<<20)
	from := r.shuffled(2)
	r.mustStore(r.put(0, from[0]))
	limited, err := gds.NewDirectRoute(r.gpu, r.direct.CuFile(),
		gds.DirectConfig{BufferBytes: 32 << 20, Limit: time.Second})
	testenv.OK(t, err)
	settled := func() {
		t.Helper()
		r.double.Rules("")
		testenv.Until(t, "no call hangs, and no slot is in use", func() bool { return r.stats().Hung == 0 && r.stats().SlotsInUse == 0 },
			func() any { return r.stats() })
	}
	t.Cleanup(func() {
		testenv.NoError(t, limited.Close())
	})
	r.route(RouteChoice{Direct: limited, Always: always})
	ids := r.shuffled(1)
	r.poison()
	r.double.Rules("cuFileRead:hang")
	r.mustLoad([]int{0}, ids)
	if s := r.stats(); s.LoadFallbacks != 1 || s.Suspended != 1 || s.Route != "staged" || s.Hung != 1 ||
		s.SlotsInUse != 1 {
		t.Errorf("always %v: %+v", always, s)
	}
	if out := r.load([]int{0}, ids); len(out.Failed) > 0 || r.stats().LoadFallbacks != 1 { // not tried
		t.Errorf("always %v: %v, %+v", always, out.Failed, r.stats())
	}
	settled()
	testenv.NoError(t, r.holds(0, ids[0], false))

	r.route(RouteChoice{Direct: limited, Always: always})
	last := r.put(1, from[1])
	r.double.Rules("cuFileWrite:hang")
	read, out := r.storeAll(last)
	if len(read.Failed) > 0 || len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, gds.ErrHung) {
		t.Errorf("always %v: %v, %v", always, read, out)
	}
	if s := r.stats(); s.StoresHung != 1 || s.StoreFallbacks != 0 || s.Route != "staged" || s.Hung != 1 ||
		s.SlotsInUse != 1 {
		t.Errorf("always %v: %+v", always, s)
	}
	settled()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(1)}, Ranks: 1})
	if err != nil || l.Hits() != 0 {
		t.Errorf("a piece was published: %d hits, %v", l.Hits(), err)
	}
	l.Release()
}
