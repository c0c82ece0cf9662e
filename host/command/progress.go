package command

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"
)

// redraw is the interval at which a progress line is drawn.
const redraw = 100 * time.Millisecond

// progress is a line on a terminal that shows the progress of a long command. If the output is not a terminal, it does
// nothing. Its methods may be called concurrently.
type progress struct {
	out   io.Writer // nil if nothing is shown
	unit  string    // unit of the count
	now   func() time.Time
	width int

	mu          sync.Mutex
	started     time.Time
	drawn       time.Time
	done, total int64
	note        string
}

// newProgress returns a progress line. It shows nothing if quiet is set or if standard error is not a terminal.
func newProgress(unit string, quiet bool) *progress {
	p := &progress{unit: unit, now: time.Now}
	if fd := int(os.Stderr.Fd()); !quiet && term.IsTerminal(fd) {
		p.out, p.width = os.Stderr, 80
		if w, _, err := term.GetSize(fd); err == nil && w > 20 {
			p.width = w
		}
	}
	return p
}

// Begin starts a count up to total.
func (p *progress) Begin(total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.started, p.drawn, p.done, p.total, p.note = p.now(), time.Time{}, 0, total, ""
}

// Step adds n to the count. A note that is not empty replaces the text next to the count.
func (p *progress) Step(n int64, note string) {
	if p.out == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	if note != "" {
		p.note = note
	}
	if now := p.now(); now.Sub(p.drawn) >= redraw {
		p.drawn = now
		p.draw(now)
	}
}

// OfFiles returns a function that calls Step for a walk over files.
func (p *progress) OfFiles() func(files, bytes int64) {
	var sum atomic.Int64
	return func(files, bytes int64) {
		p.Step(files, fmt.Sprintf("%.2f GB", float64(sum.Add(bytes))/1e9))
	}
}

func (p *progress) End() {
	if p.out == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.drawn.IsZero() {
		fmt.Fprintf(p.out, "\r%s\r", strings.Repeat(" ", p.width-1))
	}
}

// draw draws the line. mu must be held.
func (p *progress) draw(now time.Time) {
	const cells = 20
	share := 0.0
	if p.total > 0 {
		share = min(1, float64(p.done)/float64(p.total))
	}
	filled := int(share * cells)
	line := fmt.Sprintf("%d/%d %s [%s%s]", p.done, p.total, p.unit, strings.Repeat("=", filled),
		strings.Repeat("-", cells-filled))
	if p.note != "" {
		line += " " + p.note
	}
	if share > 0 && share < 1 {
		left := time.Duration(float64(now.Sub(p.started)) * (1 - share) / share)
		line += ", " + left.Round(time.Second).String() + " left"
	}
	line = line[:min(len(line), p.width-1)]
	fmt.Fprintf(p.out, "\r%-*s", p.width-1, line)
}
