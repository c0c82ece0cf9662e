package policy

import "github.com/kvhost/kvhost/abi"

// Next is the place of the next event, for a caller that counts nanoseconds: it fills the record in place, all fields of
// it, before it calls anything else of e. The record holds an older event. What [Evict.Event] says about delivery holds
// here, too.
func (e *Evict) Next() (*abi.Event, error) {
	if n := e.n; n < len(e.buf) {
		e.n = n + 1
		return &e.buf[n], nil
	}
	return e.nextBatch()
}

func (e *Evict) nextBatch() (*abi.Event, error) {
	if err := e.Flush(); err != nil {
		return nil, err
	}
	e.n = 1
	return &e.buf[0], nil
}
