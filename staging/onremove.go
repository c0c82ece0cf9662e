package staging

// OnRemove is fsys with told called after every file that it has removed, by the file's identity: for who keeps
// descriptors of files, since a file's blocks are free only when nobody has it open. What somebody else removes is not
// seen.
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
