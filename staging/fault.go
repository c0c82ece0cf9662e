package staging

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// FaultFS is an [FS] that fails on purpose, as rules say, and otherwise does what the one inside does.
//
// Each rule counts the calls that match it, so that with calls in one order the same rules strike the same calls. Of
// several rules that take a call all waits are waited, in the order of the rules, and the first failure happens.
//
// A file opened for direct I/O stays one; an EINVAL put on its transfers arrives as [ErrAlign], like the kernel's. What
// is learned so about a device stays in this FaultFS.
type FaultFS struct {
	inner FS
	rules atomic.Pointer[ruleSet] // nil: none
	modes modes
}

// RuleCount is what a rule has seen and done.
type RuleCount struct {
	Rule    Rule
	Matched uint64 // calls of its operations on its paths
	Taken   uint64 // of those, calls that it did something to
}

type ruleSet struct {
	mu       sync.Mutex
	counts   []RuleCount
	hanging  int
	changed  chan struct{} // closed, and made anew, when hanging changes
	released chan struct{}
	once     sync.Once
}

// Faulty is the twin of an FS, with rules. See [ParseRules] for their text form.
func Faulty(inner FS, rules ...Rule) *FaultFS {
	f := &FaultFS{inner: inner}
	f.Set(rules...)
	return f
}

// Set replaces the rules, and with them the counts. Calls that hang under the old ones go on.
func (f *FaultFS) Set(rules ...Rule) {
	var set *ruleSet
	if len(rules) > 0 {
		set = &ruleSet{released: make(chan struct{}), changed: make(chan struct{})}
		for _, r := range rules {
			set.counts = append(set.counts, RuleCount{Rule: r})
		}
	}
	if old := f.rules.Swap(set); old != nil {
		old.release()
	}
}

// Release lets the calls that hang or are delayed go on, and later ones not wait, until rules are set again. To tie it
// to a context: context.AfterFunc(ctx, f.Release).
func (f *FaultFS) Release() {
	if set := f.rules.Load(); set != nil {
		set.release()
	}
}

func (s *ruleSet) release() { s.once.Do(func() { close(s.released) }) }

// Hanging is how many calls hang now.
func (f *FaultFS) Hanging() int {
	set := f.rules.Load()
	if set == nil {
		return 0
	}
	set.mu.Lock()
	defer set.mu.Unlock()
	return set.hanging
}

// AwaitHanging waits until at least n calls hang.
func (f *FaultFS) AwaitHanging(ctx context.Context, n int) error {
	set := f.rules.Load()
	if set == nil {
		return fmt.Errorf("%w: no rules to hang by", ErrRule)
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
			return ctx.Err()
		}
	}
}

// Counts is what each rule has seen and done since they were set, in their order.
func (f *FaultFS) Counts() []RuleCount {
	set := f.rules.Load()
	if set == nil {
		return nil
	}
	set.mu.Lock()
	defer set.mu.Unlock()
	return slices.Clone(set.counts)
}

// Injected is how many times a rule did something since the rules were set.
func (f *FaultFS) Injected() (n uint64) {
	for _, c := range f.Counts() {
		n += c.Taken
	}
	return n
}

// strike counts a call, waits if a rule says so, and answers how it is to fail. other is a second name, or empty.
func (f *FaultFS) strike(op Op, name, other string) Fault {
	set := f.rules.Load()
	if set == nil {
		return Fault{}
	}
	var waits []Fault
	var failure Fault
	var seed uint64 // of a power loss
	set.mu.Lock()
	for i := range set.counts {
		c := &set.counts[i]
		if !c.Rule.about(op, name, other) {
			continue
		}
		c.Matched++
		if !c.Rule.When.takes(c.Matched) {
			continue
		}
		ft := c.Rule.Fault
		if ft.waits() {
			waits = append(waits, ft)
		}
		fails := ft.fails() && !failure.fails()
		if fails {
			failure, seed = ft, lot(c.Rule.When.Seed, c.Matched)
		}
		if fails || ft.waits() {
			c.Taken++
		}
	}
	set.mu.Unlock()
	for _, w := range waits {
		set.wait(w)
	}
	if failure.Power {
		if v, ok := f.inner.(*VolatileFS); ok && v.PowerLoss(seed) == nil {
			return Fault{} // the call goes on to a machine that is off
		}
		return Fault{Errno: unix.EIO}
	}
	return failure
}

func (f Fault) waits() bool { return f.Delay > 0 || f.Hang }
func (f Fault) fails() bool { return f.Errno != 0 || f.Short || f.Torn || f.Power }

func (s *ruleSet) wait(f Fault) {
	if !f.Hang {
		t := time.NewTimer(f.Delay)
		defer t.Stop()
		select {
		case <-t.C:
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

// injected is the errno of a fault, marked as one.
type injected struct{ err error }

func (e injected) Error() string   { return e.err.Error() + " (injected)" }
func (e injected) Unwrap() []error { return []error{ErrInjected, e.err} }

// call does one operation that can fail but not be cut short.
func (f *FaultFS) call(op Op, name, other string, do func() error) error {
	ft := f.strike(op, name, other)
	if ft.Errno == 0 {
		return do()
	}
	if ft.After {
		if err := do(); err != nil {
			return err
		}
	}
	if other != "" {
		return linkError(op.String(), name, other, injected{ft.Errno})
	}
	return pathError(op.String(), name, injected{ft.Errno})
}

// answer is call for an operation that tells something; with an error it tells nothing.
func answer[T any](f *FaultFS, op Op, name string, do func(string) (T, error)) (T, error) {
	var told, nothing T
	err := f.call(op, name, "", func() (err error) { told, err = do(name); return err })
	if err != nil {
		return nothing, err
	}
	return told, nil
}

func (f *FaultFS) directModes() *modes { return &f.modes }

// OpenFile implements [FS].
func (f *FaultFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	var file File
	err := f.call(OpOpen, name, "", func() (err error) {
		open := func() error {
			file, err = f.inner.OpenFile(name, flag, perm)
			return err
		}
		if flag&unix.O_DIRECT != 0 {
			return f.call(OpDirect, name, "", open)
		}
		return open()
	})
	if err != nil {
		if file != nil {
			file.Close()
		}
		return nil, err
	}
	return &faultFile{File: file, fs: f}, nil
}

// Rename implements [FS].
func (f *FaultFS) Rename(oldname, newname string) error {
	return f.call(OpRename, oldname, newname, func() error { return f.inner.Rename(oldname, newname) })
}

// RenameNoReplace implements [FS].
func (f *FaultFS) RenameNoReplace(oldname, newname string) error {
	return f.call(OpPublish, oldname, newname, func() error { return f.inner.RenameNoReplace(oldname, newname) })
}

// Link implements [FS].
func (f *FaultFS) Link(oldname, newname string) error {
	return f.call(OpLink, oldname, newname, func() error { return f.inner.Link(oldname, newname) })
}

// Remove implements [FS].
func (f *FaultFS) Remove(name string) error {
	return f.call(OpRemove, name, "", func() error { return f.inner.Remove(name) })
}

// Mkdir implements [FS].
func (f *FaultFS) Mkdir(name string, perm fs.FileMode) error {
	return f.call(OpMkdir, name, "", func() error { return f.inner.Mkdir(name, perm) })
}

// MkdirAll implements [FS].
func (f *FaultFS) MkdirAll(name string, perm fs.FileMode) error {
	return f.call(OpMkdir, name, "", func() error { return f.inner.MkdirAll(name, perm) })
}

// ReadDir implements [FS].
func (f *FaultFS) ReadDir(name string) ([]fs.DirEntry, error) {
	return answer(f, OpReadDir, name, f.inner.ReadDir)
}

// Stat implements [FS].
func (f *FaultFS) Stat(name string) (Info, error) { return answer(f, OpStat, name, f.inner.Stat) }

// SyncDir implements [FS].
func (f *FaultFS) SyncDir(name string) error {
	return f.call(OpSyncDir, name, "", func() error { return f.inner.SyncDir(name) })
}

// SyncFS implements [FS].
func (f *FaultFS) SyncFS(name string) error {
	return f.call(OpSyncFS, name, "", func() error { return f.inner.SyncFS(name) })
}

// Statfs implements [FS].
func (f *FaultFS) Statfs(name string) (Space, error) {
	return answer(f, OpStatfs, name, f.inner.Statfs)
}

// Lock implements [FS].
func (f *FaultFS) Lock(name string) (io.Closer, error) {
	var lock io.Closer
	err := f.call(OpLock, name, "", func() (err error) { lock, err = f.inner.Lock(name); return err })
	if err != nil && lock != nil {
		lock.Close()
		return nil, err
	}
	return lock, err
}
