// Command suite runs the tests of the checkout in groups: each to its end, whatever the others do. It ends in one table, with what was
// left out and why, and with the command that repeats each failure alone.
//
//	go run ./abi/testenv/internal/suite            # all groups, as make test does
//	go run ./abi/testenv/internal/suite race slow  # some
//	go run ./abi/testenv/internal/suite -list      # their names, and what is in them
//	go run ./abi/testenv/internal/suite -anywhere  # once on each kind of machine, as make test-anywhere does
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	s := &suite{dir: ".", out: os.Stdout}
	flag.DurationVar(&s.timeout, "timeout", time.Hour, "the deadline of each package's tests: what is slow ends before, and what hangs does not")
	list := flag.Bool("list", false, "list the groups, or the cells")
	cells := flag.Bool("anywhere", false, "run the tests once in each kind of surroundings, a cell, as make test-anywhere does")
	entering := flag.Bool("enter", false, "make the surroundings of the cell on standard input")
	within := flag.Bool("inside", false, "run the tests of the cell on standard input")
	flag.Parse()
	for f, on := range map[*bool]func() error{entering: enter, within: inside} {
		if !*f {
			continue
		}
		if err := on(); err != nil {
			fmt.Fprintln(os.Stderr, "suite:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(s.main(ctx, *list, *cells, flag.Args()))
}

// suite is one run.
type suite struct {
	dir      string // the checkout
	out      io.Writer
	timeout  time.Duration
	results  []*result
	tested   []string        // packages with tests
	compiled map[string]bool // binaries of cells
}

// group is tests that run together.
type group struct {
	name, holds string
	run         func(ctx context.Context, s *suite, r *result)
	// build is of a group that waits more than it works. It says whether all was built that the group needs, which then runs while the next does.
	build func(ctx context.Context, s *suite, r *result) bool
}

func (s *suite) main(ctx context.Context, list, anywhere bool, names []string) int {
	groups := groups()
	if anywhere {
		groups = s.anywhere()
	}
	if list {
		for _, g := range groups {
			fmt.Fprintf(s.out, "%-14s %s\n", g.name, g.holds)
		}
		return 0
	}
	for _, name := range names {
		if !slices.ContainsFunc(groups, func(g group) bool { return g.name == name }) {
			fmt.Fprintf(os.Stderr, "suite: no group is called %q: -list names all\n", name)
			return 2
		}
	}
	end := func() {}
	for _, g := range groups {
		if len(names) > 0 && !slices.Contains(names, g.name) {
			continue
		}
		if g.build != nil {
			end = s.begin(ctx, g)
			continue
		}
		s.run(ctx, g, s.result(g))
		end()
		end = func() {}
	}
	end()
	if code := s.report(); code != 0 || ctx.Err() == nil {
		return code
	}
	return 1
}

func (s *suite) result(g group) *result {
	r := newResult(g.name)
	s.results = append(s.results, r)
	return r
}

// begin builds what a group needs and runs it in the background. It says what it does when end is called, which waits for it.
func (s *suite) begin(ctx context.Context, g group) (end func()) {
	r := s.result(g)
	fmt.Fprintf(s.out, "\n== %s: built now, run with the next\n", g.name)
	if ctx.Err() == nil && !g.build(ctx, s, r) {
		s.told(r)
		return func() {}
	}
	var said bytes.Buffer
	own, done := &suite{dir: s.dir, out: &said, timeout: s.timeout}, make(chan struct{})
	go func() {
		defer close(done)
		own.run(ctx, g, r)
	}()
	return func() {
		<-done
		_, _ = said.WriteTo(s.out)
	}
}

// run runs a group unless the suite was interrupted.
func (s *suite) run(ctx context.Context, g group, r *result) {
	if ctx.Err() != nil {
		r.fail(failure{what: g.name, why: "interrupted before it began", again: "make test ONLY=" + g.name})
		return
	}
	fmt.Fprintf(s.out, "\n== %s: %s\n", g.name, g.holds)
	begin := time.Now()
	g.run(ctx, s, r)
	r.wall = time.Since(begin)
	s.told(r)
}

// told tells the failures of a group that were not told when they came.
func (s *suite) told(r *result) {
	for _, f := range r.failures {
		if !f.said {
			fmt.Fprintf(s.out, "%s\n--- FAILED: %s\n", strings.TrimRight(f.why, "\n"), f.what)
		}
	}
}
