package faultfs

import "github.com/kvhost/kvhost/staging"

// crashFile records the durable content of what it overwrites.
type crashFile struct {
	staging.File
	fs   *Machine
	kept *keptFile // nil when it cannot write, and once it is closed
}

// ReadAt implements [staging.File].
func (f *crashFile) ReadAt(p []byte, off int64) (int, error) {
	err := f.fs.begin(staging.OpRead, f.Name())
	defer f.fs.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

// WriteAt implements [staging.File].
func (f *crashFile) WriteAt(p []byte, off int64) (int, error) {
	err := f.fs.begin(staging.OpWrite, f.Name())
	defer f.fs.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if f.kept != nil && off >= 0 {
		if err := f.fs.before(f.kept, off, int64(len(p))); err != nil {
			return 0, err
		}
	}
	return f.File.WriteAt(p, off)
}

// Datasync implements [staging.File].
func (f *crashFile) Datasync() error {
	err := f.fs.begin(staging.OpSync, f.Name())
	defer f.fs.mu.Unlock()
	if err != nil {
		return err
	}
	if err := f.File.Datasync(); err != nil {
		return err
	}
	info, err := f.File.Stat()
	if err != nil {
		return err
	}
	if k := f.fs.files[fileID{info.Dev, info.Ino}]; k != nil { // also through a descriptor that only reads
		k.synced(info.Size)
	}
	return nil
}

// Allocate implements [staging.File].
func (f *crashFile) Allocate(n int64) error {
	err := f.fs.begin(staging.OpAllocate, f.Name())
	defer f.fs.mu.Unlock()
	if err != nil {
		return err
	}
	return f.File.Allocate(n)
}

// Stat implements [staging.File].
func (f *crashFile) Stat() (staging.Info, error) {
	return ask(f.fs, staging.OpStat, f.Name(), func(string) (staging.Info, error) {
		info, err := f.File.Stat()
		return f.fs.visible(info), err
	})
}

// Close implements [staging.File].
func (f *crashFile) Close() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	err := f.File.Close()
	if k := f.kept; k != nil {
		f.kept = nil
		if !f.fs.down {
			if derr := f.fs.drop(k); err == nil {
				err = derr
			}
		}
	}
	return err
}

// SetDirect implements [staging.DirectSetter].
func (f *crashFile) SetDirect(on bool) error {
	return f.File.(staging.DirectSetter).SetDirect(on)
}
