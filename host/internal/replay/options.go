package replay

import (
	"context"
	"fmt"
)

// Options configure a replay.
type Options struct {
	Trace    string // file name
	Socket   string // socket of a running host
	Shape    Shape
	Sessions int     // 0 means 1
	Limit    int     // most requests; 0 means all
	Speed    float64 // 0 means as fast as possible, 1 the trace's own times, 2 twice as fast
	Memory   int64   // bytes of pages per session, for all its ranks; 0 means 128 MiB

	// Start starts a host for this replay, after the trace was read through, and returns a function that stops it. If
	// it is nil, the host at Socket is running already.
	Start func(context.Context) (socket string, stop func() error, err error)

	// Begin is called once with the number of requests. Step is called after each request, by one goroutine per
	// session. Both may be nil.
	Begin func(requests int)
	Step  func(Request)
}

type Request struct {
	Accesses, Hits int
	Loaded, Stored int64 // bytes
}

const defaultMemory = 128 << 20

func (o *Options) complete() error {
	if o.Sessions == 0 {
		o.Sessions = 1
	}
	if o.Memory == 0 {
		o.Memory = defaultMemory
	}
	switch {
	case o.Trace == "":
		return fmt.Errorf("%w: no trace", ErrOptions)
	case o.Socket == "" && o.Start == nil:
		return fmt.Errorf("%w: no socket", ErrOptions)
	case o.Sessions < 1 || o.Sessions > 1024:
		return fmt.Errorf("%w: %d sessions, want 1 to 1024", ErrOptions, o.Sessions)
	case o.Limit < 0:
		return fmt.Errorf("%w: limit %d", ErrOptions, o.Limit)
	case !(o.Speed >= 0):
		return fmt.Errorf("%w: speed %v", ErrOptions, o.Speed)
	case o.Memory < 0:
		return fmt.Errorf("%w: memory %d", ErrOptions, o.Memory)
	}
	if o.Begin == nil {
		o.Begin = func(int) {}
	}
	if o.Step == nil {
		o.Step = func(Request) {}
	}
	_, err := o.Shape.Namespace()
	return err
}
