package staging

// OnRemove is fsys with a function that is called with the identity of every file that fsys removes. It is for caches
// of descriptors, because a file's blocks are freed only when no descriptor is open. Files removed by others are not
// reported.
func OnRemove(fsys FS, told func(dev, ino uint64)) FS {
	return removeFS{FS: fsys, known: directModesOf(fsys), told: told}
}

type removeFS struct {
	FS
	known *DirectModes
	told  func(dev, ino uint64)
}

// DirectModes implements [DirectModer].
func (r removeFS) DirectModes() *DirectModes { return r.known }

// Device implements [placed].
func (r removeFS) Device(name string) (uint64, error) { return deviceOf(r.FS, name) }

// Remove implements [FS].
func (r removeFS) Remove(name string) error {
	info, err := r.FS.Stat(name)
	if removed := r.FS.Remove(name); removed != nil {
		return removed
	}
	if err == nil && !info.IsDir() {
		r.told(info.Dev, info.Ino)
	}
	return nil
}
