package faultfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// FS is a [staging.FS] that injects faults into calls of another FS, as its rules say.
//
// Each rule counts the calls that match it. The same calls in the same order therefore get the same faults. When
// several rules apply to a call, it waits for all their delays, in the order of the rules, and fails with the first
// failure.
//
// A file opened for direct I/O stays direct. An injected EINVAL on its transfers is reported as [staging.ErrAlign],
// like the kernel's, and this FS then remembers that the device takes no direct I/O.
type FS struct {
	staging.Around
	rules atomic.Pointer[ruleSet]
	modes staging.DirectModes
	open  atomic.Int64
}

// counted is a rule, the calls that it has matched, and those of them that it has delayed or failed.
type counted struct {
	Rule
	matched, taken uint64
}

type ruleSet struct {
	mu       sync.Mutex
	counts   []counted
	hanging  int
	changed  chan struct{} // closed, and made anew, when hanging changes
	released chan struct{}
	once     sync.Once
}

// New wraps inner with rules. See [ParseRules] for their text form.
func New(inner staging.FS, rules ...Rule) *FS {
	f := &FS{}
	f.Around = staging.Around{Inner: inner, Run: f.call}
	f.Set(rules...)
	return f
}

// Set replaces the rules and resets the counts. Calls that hang under the old rules are released.
func (f *FS) Set(rules ...Rule) {
	set := &ruleSet{released: make(chan struct{}), changed: make(chan struct{})}
	for _, r := range rules {
		set.counts = append(set.counts, counted{Rule: r})
	}
	if old := f.rules.Swap(set); old != nil {
		old.release()
	}
}

// Release ends all hangs and delays, also those of later calls, until rules are set again. To tie it to a context:
// context.AfterFunc(ctx, f.Release).
func (f *FS) Release() { f.rules.Load().release() }

func (s *ruleSet) release() { s.once.Do(func() { close(s.released) }) }

// Hanging is how many calls hang now.
func (f *FS) Hanging() int {
	set := f.rules.Load()
	set.mu.Lock()
	defer set.mu.Unlock()
	return set.hanging
}

// AwaitHanging waits until at least n calls hang.
func (f *FS) AwaitHanging(ctx context.Context, n int) error {
	set := f.rules.Load()
	if len(set.counts) == 0 {
		return fmt.Errorf("%w: no rules are set, so no call can hang", ErrRule)
	}
	for {
		set.mu.Lock()
		hanging, changed := set.hanging, set.changed
		set.mu.Unlock()
		if hanging >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d calls hang, want %d: %w", hanging, n, ctx.Err())
		}
	}
}

// Injected is the number of faults injected since the rules were set.
func (f *FS) Injected() (n uint64) {
	set := f.rules.Load()
	set.mu.Lock()
	defer set.mu.Unlock()
	for _, c := range set.counts {
		n += c.taken
	}
	return n
}

// Take counts a call, waits if a rule says so, and returns how the call shall fail. other is a second name, or empty.
func (f *FS) Take(op staging.Op, name, other string) Fault {
	set := f.rules.Load()
	if len(set.counts) == 0 {
		return Fault{}
	}
	var waits []Fault
	var failure Fault
	var seed uint64 // of a power loss
	set.mu.Lock()
	for i := range set.counts {
		c := &set.counts[i]
		if !c.about(op, name, other) {
			continue
		}
		c.matched++
		if !c.When.takes(c.matched) {
			continue
		}
		ft := c.Fault
		if ft.waits() {
			waits = append(waits, ft)
		}
		fails := ft.fails() && !failure.fails()
		if fails {
			failure, seed = ft, lot(c.When.Seed, c.matched)
		}
		if fails || ft.waits() {
			c.taken++
		}
	}
	set.mu.Unlock()
	for _, w := range waits {
		set.wait(w)
	}
	if failure.Power {
		if v, ok := f.Inner.(interface{ PowerLoss(seed uint64) error }); ok && v.PowerLoss(seed) == nil {
			return Fault{} // the FS below now fails every call
		}
		return Fault{Errno: unix.EIO}
	}
	return failure
}

func (f Fault) waits() bool { return f.Delay > 0 || f.Hang }
func (f Fault) fails() bool { return f.Errno != 0 || f.Short || f.Torn || f.Power }

func (s *ruleSet) wait(f Fault) {
	if !f.Hang {
		select {
		case <-time.After(f.Delay):
		case <-s.released:
		}
		return
	}
	s.hang(1)
	<-s.released
	s.hang(-1)
}

func (s *ruleSet) hang(by int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hanging += by
	close(s.changed)
	s.changed = make(chan struct{})
}

// injected marks an errno as injected.
type injected struct{ err error }

func (e injected) Error() string   { return e.err.Error() + " (injected)" }
func (e injected) Unwrap() []error { return []error{ErrInjected, e.err} }

// call runs an operation that can fail but not be cut short.
func (f *FS) call(c staging.Call) error {
	ft := f.Take(c.Op, c.Name, c.Other)
	if ft.Errno == 0 {
		return c.Do()
	}
	if ft.After {
		if err := c.Do(); err != nil {
			return err
		}
		if c.Undo != nil {
			c.Undo()
		}
	}
	if c.Other != "" {
		return &os.LinkError{Op: c.Op.String(), Old: c.Name, New: c.Other, Err: injected{ft.Errno}}
	}
	return &fs.PathError{Op: c.Op.String(), Path: c.Name, Err: injected{ft.Errno}}
}

// Open counts the files that are open.
func (f *FS) Open() int { return int(f.open.Load()) }

// DirectModes makes f an FS with its own memory of which devices take direct I/O; see [staging.OpenDirect].
func (f *FS) DirectModes() *staging.DirectModes { return &f.modes }

func (f *FS) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	around := f.Around
	if flag&unix.O_DIRECT != 0 { // two operations: open, and in it direct
		around.Run = func(c staging.Call) error {
			direct := c
			direct.Op = staging.OpDirect
			c.Do = func() error { return f.call(direct) }
			return f.call(c)
		}
	}
	file, err := around.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	f.open.Add(1)
	return &faultFile{File: file, fs: f}, nil
}

// faultFile is a file of an [FS]. Rules match the name that it was opened by.
type faultFile struct {
	staging.File
	fs *FS
}

func (f *faultFile) ReadAt(p []byte, off int64) (int, error) {
	ft := f.fs.Take(staging.OpRead, f.Name(), "")
	switch {
	case ft.Errno != 0:
		return 0, f.failed(staging.OpRead, ft, func() error { _, err := f.File.ReadAt(p, off); return err })
	case ft.Short:
		cut := f.aligned(ft.cut(len(p)))
		n, err := f.File.ReadAt(p[:cut], off)
		if err == nil && n < len(p) {
			err = io.EOF
		}
		return n, err
	}
	n, err := f.File.ReadAt(p, off)
	f.learn(err)
	if ft.Torn {
		clear(p[min(n, ft.cut(len(p))):n])
	}
	return n, err
}

func (f *faultFile) WriteAt(p []byte, off int64) (int, error) {
	ft := f.fs.Take(staging.OpWrite, f.Name(), "")
	cut := ft.cut(len(p))
	switch {
	case ft.Errno != 0:
		return 0, f.failed(staging.OpWrite, ft, func() error { _, err := f.File.WriteAt(p, off); return err })
	case ft.Short:
		n, err := f.File.WriteAt(p[:f.aligned(cut)], off)
		if err == nil && n < len(p) {
			err = &fs.PathError{Op: "write", Path: f.Name(), Err: injected{io.ErrShortWrite}}
		}
		return n, err
	case ft.Torn:
		if _, err := f.File.WriteAt(p[:f.aligned(cut)], off); err != nil {
			return 0, err
		}
		return len(p), nil
	}
	n, err := f.File.WriteAt(p, off)
	f.learn(err)
	return n, err
}

func (f Fault) cut(n int) int {
	if f.Bytes < 0 {
		return n / 2
	}
	return int(min(f.Bytes, int64(n)))
}

func (f *faultFile) aligned(n int) int {
	if f.Direct() {
		return n - n%staging.Align
	}
	return n
}

func (f *faultFile) failed(op staging.Op, ft Fault, do func() error) error {
	if ft.After {
		if err := do(); err != nil {
			return err
		}
	}
	if ft.Errno == unix.EINVAL && f.Direct() {
		err := &staging.AlignError{Op: op.String(), Path: f.Name(), Field: "kernel", Want: staging.Align, Err: unix.EINVAL}
		f.learn(err)
		return fmt.Errorf("%w: %w", ErrInjected, err)
	}
	return &fs.PathError{Op: op.String(), Path: f.Name(), Err: injected{ft.Errno}}
}

// learn records that a device refused an aligned direct transfer.
func (f *faultFile) learn(err error) {
	if e, ok := err.(*staging.AlignError); ok && e.Err != nil {
		if info, err := f.File.Stat(); err == nil {
			f.fs.modes.Set(info.Dev, false)
		}
	}
}

func (f *faultFile) Datasync() error { return f.call(staging.OpSync, f.File.Datasync) }

func (f *faultFile) call(op staging.Op, do func() error) error {
	return f.fs.call(staging.Call{Op: op, Name: f.Name(), Do: do})
}

func (f *faultFile) Allocate(n int64) error {
	return f.call(staging.OpAllocate, func() error { return f.File.Allocate(n) })
}

// Shrink implements [staging.MemoryFile].
func (f *faultFile) Shrink(n int64) error { return staging.Shrink(f.File, n) }

// Memory implements [staging.MemoryFile]. To rules it is an allocation.
func (f *faultFile) Memory(n int64) (staging.Segments, error) {
	return staging.Told(f.fs.call, staging.OpAllocate, f.Name(), func() (staging.Segments, error) {
		return staging.MemoryOf(f.File, n)
	})
}

func (f *faultFile) Stat() (staging.Info, error) {
	return staging.Told(f.fs.call, staging.OpStat, f.Name(), f.File.Stat)
}

// Close implements [staging.File]. It closes the file also when a rule makes it fail, so no rule leaks a descriptor.
func (f *faultFile) Close() error {
	f.fs.open.Add(-1)
	err := f.File.Close()
	if ferr := f.call(staging.OpClose, func() error { return nil }); ferr != nil {
		return ferr
	}
	return err
}

// SetDirect implements [staging.DirectSetter].
func (f *faultFile) SetDirect(on bool) error {
	s, ok := f.File.(staging.DirectSetter)
	if !ok {
		return &fs.PathError{Op: "fcntl", Path: f.Name(), Err: unix.EINVAL}
	}
	if !on {
		return s.SetDirect(false)
	}
	return f.call(staging.OpDirect, func() error { return s.SetDirect(true) })
}

var (
	// ErrRule means that a fault rule cannot be parsed.
	ErrRule = errors.New("faultfs: bad fault rule")
	// ErrInjected is in every error that an [FS] injects, next to the errno of the rule.
	ErrInjected = errors.New("faultfs: injected fault")
	// ErrPowerLost is returned by every operation after [Machine.PowerLoss]. It wraps [ErrInjected].
	ErrPowerLost = fmt.Errorf("faultfs: power lost (%w)", ErrInjected)
)
