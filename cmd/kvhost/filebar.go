package main

import (
	"fmt"
	"os"
	"sync/atomic"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// fileBar shows how far a walk over a directory's files is, on a terminal; elsewhere it does nothing.
type fileBar struct {
	name     string
	progress *mpb.Progress
	line     *mpb.Bar
	bytes    atomic.Int64
}

func newFileBar(name string, quiet bool) *fileBar {
	b := &fileBar{name: name}
	if !quiet && term.IsTerminal(int(os.Stderr.Fd())) {
		b.progress = mpb.New(mpb.WithOutput(os.Stderr), mpb.WithWidth(48))
	}
	return b
}

func (b *fileBar) shown() bool { return b.progress != nil }

func (b *fileBar) begin(files int64) {
	if b.progress == nil {
		return
	}
	b.line = b.progress.AddBar(files, mpb.BarRemoveOnComplete(),
		mpb.PrependDecorators(decor.Name(b.name+" "), decor.CountersNoUnit("%d/%d files")),
		mpb.AppendDecorators(
			decor.Any(func(decor.Statistics) string { return fmt.Sprintf("%.2f GB, ", float64(b.bytes.Load())/1e9) }),
			decor.AverageETA(decor.ET_STYLE_GO), decor.Name(" left"),
		),
	)
}

func (b *fileBar) step(files, bytes int64) {
	if b.line == nil {
		return
	}
	b.bytes.Add(bytes)
	b.line.IncrInt64(files)
}

func (b *fileBar) end() {
	if b.line == nil {
		return
	}
	b.line.SetTotal(-1, true) // files that came and went meanwhile make it end early or late
	b.progress.Wait()
}
