package staging

import "sync"

// watchedFile is a [File] of a [WatchedFS].
type watchedFile struct {
	File
	fs *WatchedFS
}

// transfer is one read or write.
type transfer struct {
	file  File
	write bool
	p     []byte
	off   int64
	n     int
	err   error
}

var transfers = sync.Pool{New: func() any { return new(transfer) }}

func (t *transfer) run() {
	if t.write {
		t.n, t.err = t.file.WriteAt(t.p, t.off)
	} else {
		t.n, t.err = t.file.ReadAt(t.p, t.off)
	}
}

func (t *transfer) late() {}

func (f *watchedFile) transfer(op Op, p []byte, off int64) (int, error) {
	t := transfers.Get().(*transfer)
	*t = transfer{file: f.File, write: op == OpWrite, p: p, off: off}
	if err := f.fs.do(op, f.Name(), t); err != nil {
		return 0, err // the helper keeps t
	}
	n, err := t.n, t.err
	*t = transfer{}
	transfers.Put(t)
	f.fs.seen(op, f.Name(), err)
	return n, err
}

// ReadAt implements [File].
func (f *watchedFile) ReadAt(p []byte, off int64) (int, error) { return f.transfer(OpRead, p, off) }

// WriteAt implements [File].
func (f *watchedFile) WriteAt(p []byte, off int64) (int, error) { return f.transfer(OpWrite, p, off) }

// Datasync implements [File].
func (f *watchedFile) Datasync() error { return f.fs.done(OpSync, f.Name(), f.File.Datasync) }

// Allocate implements [File].
func (f *watchedFile) Allocate(n int64) error {
	return f.fs.done(OpAllocate, f.Name(), func() error { return f.File.Allocate(n) })
}

// Memory implements [MemoryFile]. It makes no system call that could hang, so it has no time limit.
func (f *watchedFile) Memory(n int64) (Segments, error) {
	if f.fs.watch.Admit != nil {
		if err := f.fs.watch.Admit(OpAllocate); err != nil {
			return nil, pathError(OpAllocate.String(), f.Name(), err)
		}
	}
	segments, err := MemoryOf(f.File, n)
	f.fs.seen(OpAllocate, f.Name(), err)
	return segments, err
}

// Shrink implements [MemoryFile].
func (f *watchedFile) Shrink(n int64) error { return Shrink(f.File, n) }

// Stat implements [File].
func (f *watchedFile) Stat() (Info, error) { return watched(f.fs, OpStat, f.Name(), nil, f.File.Stat) }

// Close implements [File].
func (f *watchedFile) Close() error { return f.fs.release(f.Name(), f.File) }
