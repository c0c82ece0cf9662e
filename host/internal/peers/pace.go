package peers

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
)

const (
	longestWait = time.Second // longest wait of a fetch for its turn
	askTime     = 200 * time.Microsecond
	keyTime     = 400 * time.Nanosecond // a request that takes longer than askTime and keyTime for each key has waited for a processor
	firstPause  = time.Second           // pause after a first failure, of a peer or of its NIXL; it doubles with each
)

// pace limits bytes a second. A rate of 0 means no limit.
type pace struct {
	rate float64 // bytes a second

	mu   sync.Mutex
	free time.Time // time at which all admitted bytes will have been sent

	turns turns
}

// turns limits the concurrent calls of each caller. The zero value allows one.
type turns struct {
	most int
	rest time.Duration // rest after a call, as a multiple of its duration, if other calls of the caller wait

	mu sync.Mutex
	of map[caller]*turn
}

// turn holds the calls of one caller.
type turn struct {
	calls int
	taken chan struct{}
}

// enter waits until few enough calls of the caller are running. The call counts as running until leave is called.
func (t *turns) enter(ctx context.Context, who caller) (leave func(), err error) {
	t.mu.Lock()
	if t.of == nil {
		t.of = map[caller]*turn{}
	}
	x := t.of[who]
	if x == nil {
		x = &turn{taken: make(chan struct{}, max(1, t.most))}
		t.of[who] = x
	}
	x.calls++
	t.mu.Unlock()
	over := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if x.calls--; x.calls == 0 {
			delete(t.of, who)
		}
	}
	select {
	case x.taken <- struct{}{}:
		since := time.Now()
		return func() {
			t.mu.Lock()
			waits := x.calls > len(x.taken)
			t.mu.Unlock()
			end := func() { <-x.taken; over() }
			if rest := t.rest * time.Since(since); waits && rest > 0 {
				time.AfterFunc(rest, end)
			} else {
				end()
			}
		}, nil
	case <-ctx.Done():
		over()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// crowd limits the concurrent calls of all callers that are not configured, of which there may be any number.
type crowd struct {
	arrivals.Queue
	rest time.Duration // as of turns
}

// enter waits until few enough calls of the crowd are running, and until no call waits of a caller that had less. What the call takes
// longer than its keys need is no reason for others of the crowd to wait: other processes had the processors.
func (c *crowd) enter(ctx context.Context, who caller, keys int) (leave func(), err error) {
	if err := c.Enter(ctx, who.id); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	since := time.Now()
	return func() {
		took := min(time.Since(since), askTime+time.Duration(keys)*keyTime)
		end := func() { c.Leave(who.id, took) }
		if rest := c.rest * took; rest > 0 && c.Waits() {
			time.AfterFunc(rest, end)
		} else {
			end()
		}
	}, nil
}

// enterAmong enters the turns of the caller, and those of the crowd if the caller is not configured.
func (t *turns) enterAmong(ctx context.Context, strangers *crowd, who caller, keys int) (leave func(), err error) {
	own, err := t.enter(ctx, who)
	if err != nil || who.known {
		return own, err
	}
	all, err := strangers.enter(ctx, who, keys)
	if err != nil {
		own()
		return nil, err
	}
	return func() { all(); own() }, nil
}

// waitOf waits for the caller's turn and then like wait.
func (p *pace) waitOf(ctx context.Context, who caller, bytes int64) error {
	if p.rate == 0 {
		return nil
	}
	soon, stop := context.WithTimeout(ctx, longestWait)
	defer stop()
	leave, err := p.turns.enter(soon, who)
	if err != nil {
		return status.Error(codes.ResourceExhausted, "its calls take as much as they may")
	}
	defer leave()
	return p.wait(ctx, bytes, longestWait)
}

// behind returns the time that a new byte would wait.
func (p *pace) behind() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(0, time.Until(p.free))
}

// wait reserves bytes and waits until they may be sent. It fails if that would take longer than most.
func (p *pace) wait(ctx context.Context, bytes int64, most time.Duration) error {
	if p.rate == 0 {
		return nil
	}
	now := time.Now()
	p.mu.Lock()
	if p.free.Before(now) {
		p.free = now
	}
	wait := p.free.Sub(now)
	if wait > most {
		p.mu.Unlock()
		return status.Error(codes.ResourceExhausted, "as much is moved as may be")
	}
	p.free = p.free.Add(time.Duration(float64(bytes) / p.rate * float64(time.Second)))
	p.mu.Unlock()
	if wait < time.Millisecond {
		return nil
	}
	turn := time.NewTimer(wait)
	defer turn.Stop()
	select {
	case <-turn.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}
