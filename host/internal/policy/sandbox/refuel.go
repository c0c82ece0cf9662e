package sandbox

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

// A guest gets its fuel in slices: see doc.go.
const (
	firstSlice = 128_000 // enough for most calls: 40 us of computation, or 2 ms of waiting for memory
	nextSlice  = 64_000
	// maxStep is the most fuel between two checks of a timed call: a copy of 2 MiB, or a very long stretch of code
	// without a loop. The time cannot be checked before its end.
	maxStep = 256_000
	// defaultCPULimit is the CPU time of a timed call, not counting its first slice and its last.
	defaultCPULimit = 3 * time.Millisecond
	// maxSliceTime is the most time that one slice counts for. A longer slice is not the guest's fault: a hypervisor
	// took the CPU away.
	maxSliceTime = 3 * time.Millisecond / 2
)

// fuelBudget is the rest of the current call: fuel that was not granted yet, and CPU time.
type fuelBudget struct {
	left     int64
	stack    *int          // points to the size of the current call's stack
	cpuLimit time.Duration // 0: no limit
	cpuTime  time.Duration
	since    time.Duration // start by the CPU clock; 0 before the second slice
	aborted  error         // the reason for which the call got no more fuel; nil if it was not aborted
}

// ThreadCPUTime returns the CPU time of the calling thread. A goroutine must be locked to its thread between two
// readings, or the time of other goroutines counts too.
func ThreadCPUTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) // every Linux has this clock
	return time.Duration(ts.Nano())
}

// grantFirst grants the first slice of a call's fuel.
func (in *Instance) grantFirst(f *Export, fuel uint64) {
	first := min(fuel, firstSlice)
	in.fuel.Set(first)
	in.budget.left, in.budget.stack = int64(fuel-first), f.stack
	if in.budget.cpuLimit = 0; f.timed {
		in.budget.cpuLimit = in.code.limits.CPUTime
	}
}

// settleFuel ends the accounting of a call and returns the remaining fuel, below zero if the call used more.
func (in *Instance) settleFuel() int64 {
	b := &in.budget
	if b.since != 0 {
		b.since, b.cpuTime = 0, 0
		runtime.UnlockOSThread()
	}
	return b.left + int64(in.fuel.Get())
}

// refuel grants the next slice to a guest with a counter below zero, or aborts the call.
func (in *Instance) refuel() {
	b, have := &in.budget, int64(in.fuel.Get())
	grant := min(b.left, nextSlice-have)
	b.left -= grant
	in.fuel.Set(uint64(have + grant))
	if have+grant < 0 {
		b.abort(ErrFuel)
	}
	if *b.stack > maxStack {
		b.abort(stackTooLarge(*b.stack))
	}
	if b.cpuLimit > 0 {
		if -have > maxStep {
			b.abort(fmt.Errorf("%w: %d units of fuel in one step, at most %d", ErrTime, -have, maxStep))
		}
		b.checkTime(in.code.cpuClock)
	}
}

// checkTime aborts a call that takes too long. The first slice is not timed, because few calls need a second.
func (b *fuelBudget) checkTime(clock func() time.Duration) {
	if b.since == 0 {
		runtime.LockOSThread()
		b.since = clock()
		return
	}
	now := clock()
	if b.cpuTime += min(now-b.since, maxSliceTime); b.cpuTime > b.cpuLimit {
		b.abort(fmt.Errorf("%w: more than %v of processor time", ErrTime, b.cpuLimit))
	}
	b.since = now
}

func (b *fuelBudget) abort(err error) {
	b.aborted = err
	panic(err) // wazero returns it as the call's error
}

// refueler is called by a guest that has used up a slice.
type refueler struct{}

func (refueler) Before(ctx context.Context, _ api.Module, _ api.FunctionDefinition, _ []uint64,
	_ experimental.StackIterator) {
	ctx.Value(instanceKey{}).(*Instance).refuel()
}

func (refueler) After(context.Context, api.Module, api.FunctionDefinition, []uint64) {}
func (refueler) Abort(context.Context, api.Module, api.FunctionDefinition, error)    {}

// exhausted turns an aborted call into a fault.
func (in *Instance) exhausted(name string, fuel uint64, err error) error {
	cause := in.budget.aborted
	in.budget.aborted = nil
	reason := fmt.Sprintf("used up its fuel of %d", fuel)
	if errors.Is(cause, ErrTime) || errors.Is(cause, errStack) {
		reason = cause.Error()
	} else {
		cause = ErrFuel
	}
	fault := in.Fault(name, reason, cause)
	fault.Stack = stackOf(err)
	return fault
}
