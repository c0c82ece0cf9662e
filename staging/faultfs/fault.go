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
	inner staging.FS
	rules atomic.Pointer[ruleSet] // nil: none
	modes staging.DirectModes
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
	f := &FS{inner: inner}
	f.Set(rules...)
	return f
}

// Set replaces the rules and resets the counts. Calls that hang under the old rules are released.
func (f *FS) Set(rules ...Rule) {
	var set *ruleSet
	if len(rules) > 0 {
		set = &ruleSet{released: make(chan struct{}), changed: make(chan struct{})}
		for _, r := range rules {
			set.counts = append(set.counts, counted{Rule: r})
		}
	}
	if old := f.rules.Swap(set); old != nil {
		old.release()
	}
}

// Release ends all hangs and delays, also those of later calls, until rules are set again. To tie it to a context:
// context.AfterFunc(ctx, f.Release).
func (f *FS) Release() {
	if set := f.rules.Load(); set != nil {
		set.release()
	}
}

func (s *ruleSet) release() { s.once.Do(func() { close(s.released) }) }

// Hanging is how many calls hang now.
func (f *FS) Hanging() int {
	set := f.rules.Load()
	if set == nil {
		return 0
	}
	set.mu.Lock()
	defer set.mu.Unlock()
	return set.hanging
}

// AwaitHanging waits until at least n calls hang.
func (f *FS) AwaitHanging(ctx context.Context, n int) error {
	set := f.rules.Load()
	if set == nil {
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
			return ctx.Err()
		}
	}
}

// Injected is the number of faults injected since the rules were set.
func (f *FS) Injected() (n uint64) {
	set := f.rules.Load()
	if set == nil {
		return 0
	}
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
	if set == nil {
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
		if v, ok := f.inner.(interface{ PowerLoss(seed uint64) error }); ok && v.PowerLoss(seed) == nil {
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

// injected marks an errno as injected.
type injected struct{ err error }

func (e injected) Error() string   { return e.err.Error() + " (injected)" }
func (e injected) Unwrap() []error { return []error{ErrInjected, e.err} }

// call runs an operation that can fail but not be cut short.
func (f *FS) call(op staging.Op, name, other string, do func() error) error {
	ft := f.Take(op, name, other)
	if ft.Errno == 0 {
		return do()
	}
	if ft.After {
		if err := do(); err != nil {
			return err
		}
	}
	if other != "" {
		return &os.LinkError{Op: op.String(), Old: name, New: other, Err: injected{ft.Errno}}
	}
	return &fs.PathError{Op: op.String(), Path: name, Err: injected{ft.Errno}}
}

// answer is call for an operation with a result. With an error the result is the zero value.
func answer[T any](f *FS, op staging.Op, name string, do func(string) (T, error)) (T, error) {
	var told, nothing T
	err := f.call(op, name, "", func() (err error) { told, err = do(name); return err })
	if err != nil {
		return nothing, err
	}
	return told, nil
}

// DirectModes makes f an FS with its own memory of which devices take direct I/O; see [staging.OpenDirect].
func (f *FS) DirectModes() *staging.DirectModes { return &f.modes }

// OpenFile implements [staging.FS].
func (f *FS) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	var file staging.File
	err := f.call(staging.OpOpen, name, "", func() (err error) {
		open := func() error {
			file, err = f.inner.OpenFile(name, flag, perm)
			return err
		}
		if flag&unix.O_DIRECT != 0 {
			return f.call(staging.OpDirect, name, "", open)
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

// Rename implements [staging.FS].
func (f *FS) Rename(oldname, newname string) error {
	return f.call(staging.OpRename, oldname, newname, func() error { return f.inner.Rename(oldname, newname) })
}

// RenameNoReplace implements [staging.FS].
func (f *FS) RenameNoReplace(oldname, newname string) error {
	return f.call(staging.OpPublish, oldname, newname, func() error { return f.inner.RenameNoReplace(oldname, newname) })
}

// Link implements [staging.FS].
func (f *FS) Link(oldname, newname string) error {
	return f.call(staging.OpLink, oldname, newname, func() error { return f.inner.Link(oldname, newname) })
}

// Remove implements [staging.FS].
func (f *FS) Remove(name string) error {
	return f.call(staging.OpRemove, name, "", func() error { return f.inner.Remove(name) })
}

// Mkdir implements [staging.FS].
func (f *FS) Mkdir(name string, perm fs.FileMode) error {
	return f.call(staging.OpMkdir, name, "", func() error { return f.inner.Mkdir(name, perm) })
}

// MkdirAll implements [staging.FS].
func (f *FS) MkdirAll(name string, perm fs.FileMode) error {
	return f.call(staging.OpMkdir, name, "", func() error { return f.inner.MkdirAll(name, perm) })
}

// ReadDir implements [staging.FS].
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	return answer(f, staging.OpReadDir, name, f.inner.ReadDir)
}

// Stat implements [staging.FS].
func (f *FS) Stat(name string) (staging.Info, error) {
	return answer(f, staging.OpStat, name, f.inner.Stat)
}

// SyncDir implements [staging.FS].
func (f *FS) SyncDir(name string) error {
	return f.call(staging.OpSyncDir, name, "", func() error { return f.inner.SyncDir(name) })
}

// SyncFS implements [staging.FS].
func (f *FS) SyncFS(name string) error {
	return f.call(staging.OpSyncFS, name, "", func() error { return f.inner.SyncFS(name) })
}

// Statfs implements [staging.FS].
func (f *FS) Statfs(name string) (staging.Space, error) {
	return answer(f, staging.OpStatfs, name, f.inner.Statfs)
}

// Lock implements [staging.FS].
func (f *FS) Lock(name string) (io.Closer, error) {
	var lock io.Closer
	err := f.call(staging.OpLock, name, "", func() (err error) { lock, err = f.inner.Lock(name); return err })
	if err != nil && lock != nil {
		lock.Close()
		return nil, err
	}
	return lock, err
}

// faultFile is a file of an [FS]. Rules match the name that it was opened by.
type faultFile struct {
	staging.File
	fs *FS
}

// ReadAt implements [staging.File].
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

// WriteAt implements [staging.File].
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
		if err := f.tear(p[:cut], off); err != nil {
			return 0, err
		}
		return len(p), nil
	}
	n, err := f.File.WriteAt(p, off)
	f.learn(err)
	return n, err
}

// tear writes all of p. The end that direct I/O cannot write, because it is not aligned, goes through the page cache.
func (f *faultFile) tear(p []byte, off int64) error {
	whole := f.aligned(len(p))
	if _, err := f.File.WriteAt(p[:whole], off); err != nil || whole == len(p) {
		return err
	}
	tail, err := f.fs.inner.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer tail.Close()
	_, err = tail.WriteAt(p[whole:], off+int64(whole))
	return err
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

// Datasync implements [staging.File].
func (f *faultFile) Datasync() error { return f.fs.call(staging.OpSync, f.Name(), "", f.File.Datasync) }

// Allocate implements [staging.File].
func (f *faultFile) Allocate(n int64) error {
	return f.fs.call(staging.OpAllocate, f.Name(), "", func() error { return f.File.Allocate(n) })
}

// Shrink implements [staging.MemoryFile].
func (f *faultFile) Shrink(n int64) error { return staging.Shrink(f.File, n) }

// Memory implements [staging.MemoryFile]. To rules it is an allocation.
func (f *faultFile) Memory(n int64) (segments staging.Segments, err error) {
	err = f.fs.call(staging.OpAllocate, f.Name(), "", func() (err error) {
		segments, err = staging.MemoryOf(f.File, n)
		return err
	})
	if err != nil {
		return nil, err
	}
	return segments, nil
}

// Stat implements [staging.File].
func (f *faultFile) Stat() (staging.Info, error) {
	return answer(f.fs, staging.OpStat, f.Name(), func(string) (staging.Info, error) { return f.File.Stat() })
}

// Close implements [staging.File]. It closes the file also when a rule makes it fail, so no rule leaks a descriptor.
func (f *faultFile) Close() error {
	err := f.File.Close()
	if ferr := f.fs.call(staging.OpClose, f.Name(), "", func() error { return nil }); ferr != nil {
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
	return f.fs.call(staging.OpDirect, f.Name(), "", func() error { return s.SetDirect(true) })
}

var (
	// ErrRule means that a fault rule cannot be parsed.
	ErrRule = errors.New("faultfs: bad fault rule")
	// ErrInjected is in every error that an [FS] injects, next to the errno of the rule.
	ErrInjected = errors.New("faultfs: injected fault")
	// ErrPowerLost is returned by every operation after [Machine.PowerLoss]. It wraps [ErrInjected].
	ErrPowerLost = fmt.Errorf("faultfs: power lost (%w)", ErrInjected)
)
