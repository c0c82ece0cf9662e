//go:build linux

package testenv

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"
)

// TallyFile is the environment variable that names the file in which parts of make torture say what they did.
const TallyFile = "KVHOST_TALLY"

// tallyEvery is how often a running part writes its line, so that one that is killed has said most.
const tallyEvery = 10 * time.Second

// Tally counts what one part of make torture does. Without [TallyFile] it only ends in a line of the test's log.
type Tally struct {
	tb    testing.TB
	part  string
	start time.Time

	mu                       sync.Mutex
	operations, kills, seeds int64
	written                  time.Time
}

// NewTally begins the count of a part. The test's end writes the last line.
func NewTally(tb testing.TB, part string) *Tally {
	t := &Tally{tb: tb, part: part, start: time.Now()}
	t.written = t.start
	tb.Cleanup(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		tb.Log(t.line())
		t.write()
	})
	return t
}

// Add counts operations that were checked, processes and machines that ended badly, and seeds.
func (t *Tally) Add(operations, kills, seeds int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.operations, t.kills, t.seeds = t.operations+operations, t.kills+kills, t.seeds+seeds
	if now := time.Now(); now.Sub(t.written) >= tallyEvery {
		t.written = now
		t.write()
	}
}

func (t *Tally) line() string {
	failures := 0
	if t.tb.Failed() {
		failures = 1
	}
	return fmt.Sprintf("part=%s operations=%d kills=%d seeds=%d failures=%d seconds=%.0f", t.part, t.operations, t.kills,
		t.seeds, failures, time.Since(t.start).Seconds())
}

func (t *Tally) write() {
	path := os.Getenv(TallyFile)
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = fmt.Fprintln(f, t.line())
		if closing := f.Close(); err == nil {
			err = closing
		}
	}
	if err != nil {
		t.tb.Errorf("tally: %v", err)
	}
}
