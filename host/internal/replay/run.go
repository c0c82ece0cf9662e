package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/trace"
)

// ahead is the number of requests that may wait for a session before the dealer blocks.
const ahead = 64

// Run replays a trace. It reads the whole trace once before it sends anything, so that damage is found first. If the
// run itself fails, Run returns a report of the work done before, or nil. Wrong answers of the host are in the report:
// see [Report.Err].
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	requests, err := count(ctx, o.Trace, o.Limit)
	if err != nil {
		return nil, err
	}
	if o.Start != nil {
		socket, stop, startErr := o.Start(ctx)
		if startErr != nil {
			return nil, startErr
		}
		defer func() { err = errors.Join(err, stop()) }()
		o.Socket = socket
	}
	return run(ctx, &o, requests)
}

func run(ctx context.Context, o *Options, requests int) (*Report, error) {
	engines, err := dialAll(ctx, o)
	if err != nil {
		return nil, err
	}
	before := &proto.StatusResponse{} // a host that this replay starts has done nothing else, so all of its calls count
	if o.Start == nil {
		if before, err = proto.Status(ctx, o.Socket); err != nil {
			return nil, errors.Join(fmt.Errorf("replay: status: %w", err), closeAll(engines))
		}
	}
	o.Begin(requests)
	start := time.Now()
	failure := play(ctx, o, engines)
	elapsed := time.Since(start)

	total := tally{}
	for _, e := range engines {
		total.merge(&e.tally)
	}
	report := newReport(o, &total, elapsed)
	if after, err := proto.Status(context.WithoutCancel(ctx), o.Socket); err == nil {
		report.addPolicies(before, after)
		report.addLevels(before, after)
	} else if failure == nil {
		failure = fmt.Errorf("replay: status: %w", err)
	}
	if err := closeAll(engines); failure == nil {
		failure = err
	}
	return report, failure
}

// count reads a trace up to a limit (0: all) and returns the number of its requests.
func count(ctx context.Context, path string, limit int) (int, error) {
	r, err := trace.Open(path)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	var req trace.Request
	for n := 0; ; n++ {
		if limit > 0 && n == limit {
			return n, nil
		}
		switch err := r.Next(&req); {
		case err == io.EOF && n == 0:
			return 0, fmt.Errorf("%w: %s holds no requests", ErrOptions, path)
		case err == io.EOF:
			return n, nil
		case err != nil:
			return 0, err
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
	}
}

func dialAll(ctx context.Context, o *Options) ([]*engine, error) {
	var engines []*engine
	for i := range o.Sessions {
		e, err := dial(ctx, o, fmt.Sprintf("replay-%d-%d", os.Getpid(), i))
		if err != nil {
			return nil, errors.Join(err, closeAll(engines))
		}
		engines = append(engines, e)
	}
	return engines, nil
}

func closeAll(engines []*engine) error {
	var errs []error
	for _, e := range engines {
		errs = append(errs, e.close())
	}
	return errors.Join(errs...)
}

// play deals the trace to the engines and waits for them.
func play(ctx context.Context, o *Options, engines []*engine) error {
	group, ctx := errgroup.WithContext(ctx)
	queues := make([]chan numbered, len(engines))
	for i, e := range engines {
		queues[i] = make(chan numbered, ahead)
		group.Go(func() error {
			return e.run(ctx, o, queues[i])
		})
	}
	group.Go(func() error {
		defer func() {
			for _, q := range queues {
				close(q)
			}
		}()
		return deal(ctx, o, queues)
	})
	return group.Wait()
}

// run plays the requests of a queue.
func (e *engine) run(ctx context.Context, o *Options, queue <-chan numbered) error {
	for req := range queue {
		if err := ctx.Err(); err != nil {
			return err
		}
		done, err := e.play(ctx, req.number, &req.Request)
		if err != nil {
			return err
		}
		o.Step(done)
	}
	return nil
}

// numbered is a request with its position in the trace, from 1. It is also its number in the session.
type numbered struct {
	trace.Request
	number uint32
}

func deal(ctx context.Context, o *Options, queues []chan numbered) error {
	r, err := trace.Open(o.Trace)
	if err != nil {
		return err
	}
	defer r.Close()
	dealer := newDealer(len(queues))
	start := time.Now()
	var origin int64
	for n := 1; o.Limit == 0 || n <= o.Limit; n++ {
		var req trace.Request // not reused: it is sent to another goroutine
		if err := r.Next(&req); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if n == 1 {
			origin = req.Timestamp
		}
		if o.Speed > 0 {
			due := start.Add(time.Duration(float64(req.Timestamp-origin) / o.Speed * float64(time.Millisecond)))
			if err := sleepUntil(ctx, due); err != nil {
				return err
			}
		}
		select {
		case queues[dealer.Deal(req.HashIDs)] <- numbered{req, uint32(n)}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func sleepUntil(ctx context.Context, due time.Time) error {
	wait := time.Until(due)
	if wait <= 0 {
		return nil
	}
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
