package s3fs

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// hedge determines when the answer to a read is late, and limits the number of reads that are therefore repeated.
type hedge struct {
	mu   sync.Mutex
	late time.Duration // about the 95th percentile of answer times
	left float64       // number of reads that may be repeated
}

const (
	hedgeShare = 0.05 // part of the reads that is late, and that may be repeated
	hedgeMost  = 10.  // most reads that may be repeated in a row
	hedgeStep  = 0.05 // step by which late follows the answer times
)

// after returns the time after which an answer is late. It is 0 while that is unknown.
func (h *hedge) after() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.late
}

// took records an answer time.
func (h *hedge) took(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.left = min(h.left+hedgeShare, hedgeMost)
	switch {
	case h.late == 0:
		h.late = 4 * d
	case d > h.late:
		h.late += time.Duration(float64(h.late) * hedgeStep * (1 - hedgeShare))
	default:
		h.late -= time.Duration(float64(h.late) * hedgeStep * hedgeShare)
	}
}

// spend reports whether a read may be repeated, and counts it.
func (h *hedge) spend() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.left < 1 {
		return false
	}
	h.left--
	return true
}

// answer is the result of a read.
type answer struct {
	s   *stream
	v   version
	err error
}

// begin requests bytes of an object, and requests them a second time if the answer is late. The first answer counts.
func (c *client) begin(ctx context.Context, key, etag string, off int64, most int) (*stream, version, error) {
	began, after := time.Now(), c.hedge.after()
	if after == 0 || c.outage.Load() != nil {
		s, v, err := c.ask(ctx, key, etag, off, most)
		if err == nil {
			c.hedge.took(time.Since(began))
		}
		return s, v, err
	}
	first, endFirst := context.WithCancel(ctx)
	second, endSecond := context.WithCancel(ctx)
	var won atomic.Bool // set by the first of the two that succeeds
	again := make(chan answer, 1)
	timer := time.AfterFunc(after, func() {
		var a answer
		if c.hedge.spend() {
			if a.s, a.v, a.err = c.ask(second, key, etag, off, most); a.err == nil && won.CompareAndSwap(false, true) {
				endFirst()
			}
			c.made[Get].Add(1)
		}
		again <- a
	})
	a := answer{}
	a.s, a.v, a.err = c.ask(first, key, etag, off, most)
	if a.err == nil || won.Load() {
		c.hedge.took(time.Since(began))
	}
	end := endFirst
	if timer.Stop() {
		endSecond()
	} else if a.err == nil && won.CompareAndSwap(false, true) {
		endSecond()
		if b := <-again; b.s != nil {
			b.s.close()
		}
	} else if b := <-again; b.s != nil {
		if a.s != nil {
			a.s.close()
		}
		endFirst()
		a, end = b, endSecond
	} else {
		endSecond()
	}
	if a.err != nil {
		end()
		return nil, version{}, a.err
	}
	stop := a.s.stop
	a.s.stop = func() { stop(); end() }
	return a.s, a.v, nil
}
