package staging

// volatileFile remembers what it overwrites.
type volatileFile struct {
	File
	fs   *VolatileFS
	kept *keptFile // nil when it cannot write, and once it is closed
}

// ReadAt implements [File].
func (f *volatileFile) ReadAt(p []byte, off int64) (int, error) {
	err := f.fs.begin(OpRead, f.Name())
	defer f.fs.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

// WriteAt implements [File].
func (f *volatileFile) WriteAt(p []byte, off int64) (int, error) {
	err := f.fs.begin(OpWrite, f.Name())
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

// Datasync implements [File].
func (f *volatileFile) Datasync() error {
	err := f.fs.begin(OpSync, f.Name())
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

// Allocate implements [File].
func (f *volatileFile) Allocate(n int64) error {
	err := f.fs.begin(OpAllocate, f.Name())
	defer f.fs.mu.Unlock()
	if err != nil {
		return err
	}
	return f.File.Allocate(n)
}

// Stat implements [File].
func (f *volatileFile) Stat() (Info, error) {
	return ask(f.fs, OpStat, f.Name(), func(string) (Info, error) {
		info, err := f.File.Stat()
		return f.fs.visible(info), err
	})
}

// Close implements [File].
func (f *volatileFile) Close() error {
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

func (f *volatileFile) setDirect(on bool) error {
	return f.File.(directSetter).setDirect(on)
}
