package s3fs

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// hedge says when the answer to a read is late, and bounds the reads that are asked for again because of that.
type hedge struct {
	mu   sync.Mutex
	late time.Duration // about the 95th percentile of what answers took
	left float64       // reads that may be asked for again
}

const (
	hedgeShare = 0.05 // of reads; so many are late
	hedgeMost  = 10.  // at once
	hedgeStep  = 0.05 // by which late follows what answers take
)

// after is when an answer is late; 0: that is not known yet.
func (h *hedge) after() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.late
}

// took notes what an answer took.
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

// spend says whether a read may be asked for again.
func (h *hedge) spend() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.left < 1 {
		return false
	}
	h.left--
	return true
}

// answer is what a read got.
type answer struct {
	s   *stream
	v   version
	err error
}

// begin asks for so many bytes of an object, and once more where the answer is late: the first answer counts.
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
	var won atomic.Bool // by one of the two
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
