// Package scheduler runs the threads of a model, of which one at a time goes on to its next operation. So a seed is a history, in which a
// thread can sleep or die between any two operations.
package scheduler

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/zeebo/xxh3"
)

// Scheduler has the threads of a model, their clock, and a trace of what they do.
type Scheduler struct {
	Rng     *rand.Rand
	Now     time.Duration
	Longest time.Duration // of an operation
	Threads []*Thread     // also those that have ended
	At      *Thread       // the one that has the turn
	Trace   []string      // the latest lines
	Sum     uint64        // of all lines
	awake   []*Thread
}

// Thread is one of a process.
type Thread struct {
	ID      string
	Process any
	Wake    time.Duration // it sleeps until then
	Ended   bool
	Err     error // what its program has returned

	s     *Scheduler
	ready chan struct{} // to the scheduler: it waits for its next turn, or has ended
	turn  chan bool     // to the thread: go on, or die
	dead  bool
}

type died struct{}

// New has no threads. Its clock begins at an hour.
func New(seed, model uint64, longest time.Duration) *Scheduler {
	return &Scheduler{Rng: rand.New(rand.NewPCG(seed, model)), Now: time.Hour, Longest: longest}
}

// Start runs a program as a thread of a process.
func (s *Scheduler) Start(id string, process any, program func(t *Thread) error) *Thread {
	t := &Thread{s: s, ID: id, Process: process, ready: make(chan struct{}), turn: make(chan bool)}
	s.Threads = append(s.Threads, t)
	go func() {
		defer func() {
			if x := recover(); x != nil {
				if _, ok := x.(died); !ok {
					panic(x)
				}
			}
			t.Ended = true
			t.ready <- struct{}{}
		}()
		t.Yield()
		t.Err = program(t)
	}()
	<-t.ready
	return t
}

// Yield waits for the thread's turn.
func (t *Thread) Yield() {
	if t.dead {
		panic(died{})
	}
	t.ready <- struct{}{}
	if !<-t.turn {
		t.dead = true
		panic(died{})
	}
}

// Sleep waits for the thread's turn after a time.
func (t *Thread) Sleep(d time.Duration) {
	t.Wake = t.s.Now + d
	t.Yield()
}

// Kill ends a process, before the next operation of each of its threads.
func (s *Scheduler) Kill(process any) {
	for _, t := range s.Threads {
		if t.Process == process && !t.Ended {
			s.At = t
			t.turn <- false
			<-t.ready
		}
	}
}

// Step lets one thread do one operation, or time pass until one is awake. It is false when there is none.
func (s *Scheduler) Step() bool {
	s.awake = s.awake[:0]
	var first *Thread // of those that sleep
	for _, t := range s.Threads {
		switch {
		case t.Ended:
		case t.Wake <= s.Now:
			s.awake = append(s.awake, t)
		case first == nil || t.Wake < first.Wake:
			first = t
		}
	}
	if len(s.awake) == 0 {
		if first == nil {
			return false
		}
		s.Now = first.Wake
		return true
	}
	t := s.awake[s.Rng.IntN(len(s.awake))]
	s.Now += time.Duration(s.Rng.Int64N(int64(s.Longest)))
	s.At = t
	t.turn <- true
	<-t.ready
	return true
}

// Note adds a line of a thread to the trace.
func (s *Scheduler) Note(t *Thread, format string, args ...any) {
	line := fmt.Sprintf("%9.4f %s ", s.Now.Seconds(), t.ID) + fmt.Sprintf(format, args...)
	s.Trace, s.Sum = append(s.Trace, line), xxh3.HashStringSeed(line, s.Sum)
	if len(s.Trace) > 40_000 {
		s.Trace = s.Trace[20_000:]
	}
}
