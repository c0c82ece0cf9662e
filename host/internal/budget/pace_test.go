package budget

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// paceRig is sessions of tenants on so many processors.
func paceRig(t *testing.T, tenants ...uint32) (list []*Session) {
	memory, err := OfMemory(1<<30, 0, 8)
	testenv.OK(t, err)
	b := &Sessions{
		Memory: memory, Descriptors: OfDescriptors(8), Mappings: OfMappings(8), Room: OfRoom(1<<30, 8), Leased: OfLeased(1<<30, 8),
		Processors: 2,
	}
	for i, tenant := range tenants {
		s, err := b.New(uint64(i))
		testenv.OK(t, err)
		testenv.NoError(t, s.Greeted(uint64(i), &proto.Hello{Tenant: tenant}))
		t.Cleanup(func() {
			s.Leave()
			if n := len(b.pace.tenants); i == 0 && n != 0 {
				t.Errorf("%d tenants are left of sessions that ended", n)
			}
		})
		list = append(list, s)
	}
	return list
}

// handle is a message of a weight that takes some time to handle, and returns the pause after it.
func handle(s *Session, weight int64, took time.Duration) time.Duration {
	s.weight = weight
	since := time.Now()
	time.Sleep(took)
	return s.Spent(since)
}

// TestPace: among others, what a tenant sends takes half of the two processors in the long run; another, which does little, is not
// paused.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := paceRig(t, 1, 2)
		greedy, modest := list[0], list[1]
		const took, weight = 500 * time.Microsecond, 100_000
		began, busy := time.Now(), time.Duration(0)
		for range 1000 {
			if d := handle(modest, 100, 10*time.Microsecond); d != 0 {
				t.Fatalf("the modest tenant pauses for %v", d)
			}
			d := handle(greedy, weight, took)
			busy += spentOn(weight, took)
			time.Sleep(d)
		}
		if part := float64(busy) / float64(time.Since(began)); part < 0.9 || part > 1.1 {
			t.Errorf("the greedy tenant has %.2f processors, want half of 2", part)
		}
	})
}

// TestPaceAlone: a tenant that is alone, or beside one that sends nothing, never pauses.
func TestPaceAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := paceRig(t, 1, 2)
		handle(list[1], 100, time.Millisecond)
		time.Sleep(2 * paceWindow)
		for n := range 100 {
			if d := handle(list[0], 1<<20, 5*time.Millisecond); d != 0 {
				t.Fatalf("a pause of %v after %d messages", d, n)
			}
		}
	})
}

// TestPaceOfWhatWaits: a message that waited for long, as for a disk, counts by its weight.
func TestPaceOfWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := paceRig(t, 1, 2)
		since := time.Now()
		time.Sleep(time.Minute)
		handle(list[1], 100, time.Microsecond)
		list[0].weight = 100
		if d := list[0].Spent(since); d != 0 {
			t.Errorf("a pause of %v", d)
		}
	})
}
