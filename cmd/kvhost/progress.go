package main

import (
	"fmt"
	"os"
	"sync/atomic"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/replay"
)

// bar shows how far a replay is, on a terminal; elsewhere it does nothing.
type bar struct {
	progress *mpb.Progress
	line     *mpb.Bar

	accesses, hits, bytes atomic.Int64
}

func newBar() *bar {
	b := &bar{}
	if term.IsTerminal(int(os.Stderr.Fd())) {
		b.progress = mpb.New(mpb.WithOutput(os.Stderr), mpb.WithWidth(48))
	}
	return b
}

func (b *bar) begin(requests int) {
	if b.progress == nil {
		return
	}
	b.line = b.progress.AddBar(int64(requests),
		mpb.PrependDecorators(decor.CountersNoUnit("%d/%d requests")),
		mpb.AppendDecorators(
			decor.Any(func(decor.Statistics) string {
				ratio := 0.0
				if a := b.accesses.Load(); a > 0 {
					ratio = float64(b.hits.Load()) / float64(a)
				}
				return fmt.Sprintf("hit ratio %.4f, %.2f GB, ", ratio, float64(b.bytes.Load())/1e9)
			}),
			decor.OnComplete(decor.AverageETA(decor.ET_STYLE_GO), "done"),
		),
	)
}

func (b *bar) step(r replay.Request) {
	if b.line == nil {
		return
	}
	b.accesses.Add(int64(r.Accesses))
	b.hits.Add(int64(r.Hits))
	b.bytes.Add(r.Loaded + r.Stored)
	b.line.Increment()
}

func (b *bar) end() {
	if b.line == nil {
		return
	}
	b.line.Abort(false) // without effect when it is complete
	b.progress.Wait()
}
