package policy

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	metering "github.com/kvhost/kvhost/host/policy/meter"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

// A guest gets its fuel in slices. When one is used up it calls into the host, and gets the next if the call has any left.
// That is where Go's scheduler and garbage collector find it: code of a guest cannot be preempted. And that is where its
// time is looked at. Fuel counts instructions, and one that waits for memory takes a hundred times as long as one that does
// not: a budget that is enough for the honest ones is tens of milliseconds of that.
const (
	firstSlice = 128_000 // enough for most calls; 40 us of calculation, or 2 ms of waiting for memory
	nextSlice  = 64_000
	// mostAtOnce is what a timed call may want in one go: a copy of 2 MiB, a very long stretch of code without a loop.
	// Nobody can look at the clock meanwhile.
	mostAtOnce = 256_000
	// defaultPatience is the processor time of a timed call, not counting its first slice and its last.
	defaultPatience = 3 * time.Millisecond
	// mostOfSlice is what one slice can count for. What takes longer is not the guest's doing: the machine's hypervisor had
	// something else to do.
	mostOfSlice = 3 * time.Millisecond / 2
)

// ration is the fuel of the call under way that the guest does not have yet, and the time it takes.
type ration struct {
	left     int64
	patience time.Duration // 0: any time
	took     time.Duration
	since    time.Duration // by clock; 0 before the second slice
	refused  error         // why it got no more
}

// clock is the processor time of the calling thread. A goroutine that is preempted between two readings must be locked to its
// thread, or another one's work would count.
var clock = func() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) // there is one on every Linux
	return time.Duration(ts.Nano())
}

// begin gives a guest the first slice of a call's fuel.
func (in *instance) begin(f *export, fuel uint64) {
	first := min(fuel, firstSlice)
	in.fuel.Set(first)
	in.ration.left = int64(fuel - first)
	if in.ration.patience = 0; f.waited {
		in.ration.patience = in.m.code.fuel.patience
	}
}

// end lets go of what a call of several slices held, and says what is left of its fuel: below zero when it used more.
func (in *instance) end() int64 {
	r := &in.ration
	if r.since != 0 {
		r.since, r.took = 0, 0
		runtime.UnlockOSThread()
	}
	return r.left + int64(in.fuel.Get())
}

// refuel gives the next slice to a guest whose counter is below zero, or ends the call.
func (in *instance) refuel() {
	r, have := &in.ration, int64(in.fuel.Get())
	give := min(r.left, nextSlice-have)
	r.left -= give
	in.fuel.Set(uint64(have + give))
	if have+give < 0 {
		r.refuse(ErrFuel)
	}
	if r.patience > 0 {
		if -have > mostAtOnce {
			r.refuse(fmt.Errorf("%w: %d units of fuel in one go, at most %d", ErrTime, -have, mostAtOnce))
		}
		r.look()
	}
}

// look ends a call that takes too long. The first slice is not timed, because few calls need a second.
func (r *ration) look() {
	if r.since == 0 {
		runtime.LockOSThread()
		r.since = clock()
		return
	}
	now := clock()
	if r.took += min(now-r.since, mostOfSlice); r.took > r.patience {
		r.refuse(fmt.Errorf("%w: more than %v of processor time", ErrTime, r.patience))
	}
	r.since = now
}

func (r *ration) refuse(err error) {
	r.refused = err
	panic(err) // wazero makes it the call's error
}

// refueler is called by a guest that has used up a slice.
type refueler struct{}

func (refueler) Before(ctx context.Context, _ api.Module, _ api.FunctionDefinition, _ []uint64, _ experimental.StackIterator) {
	ctx.Value(instanceKey{}).(*instance).refuel()
}

func (refueler) After(context.Context, api.Module, api.FunctionDefinition, []uint64) {}
func (refueler) Abort(context.Context, api.Module, api.FunctionDefinition, error)    {}

// withRefueler makes a compiler call the host for the next slice.
func withRefueler(ctx context.Context) context.Context {
	return experimental.WithFunctionListenerFactory(ctx, experimental.FunctionListenerFactoryFunc(
		func(f api.FunctionDefinition) experimental.FunctionListener {
			if slices.Contains(f.ExportNames(), metering.Refuel) {
				return refueler{}
			}
			return nil
		}))
}

// exhausted turns a call that was given no more into a fault.
func (in *instance) exhausted(name string, fuel uint64, err error) error {
	cause := in.ration.refused
	in.ration.refused = nil
	reason := fmt.Sprintf("used up its fuel of %d", fuel)
	if errors.Is(cause, ErrTime) {
		reason = cause.Error()
	} else {
		cause = ErrFuel
	}
	fault := in.fault(name, reason, cause)
	fault.Stack = stackOf(err)
	return fault
}
