package staging

import (
	"io"
	"io/fs"
)

// Around is an [FS] over another one. Run makes all operations on names. Open files are those of the other FS.
type Around struct {
	Inner FS
	Run   func(Call) error
}

// Call is one operation. Its results are used only if Run returns no error.
type Call struct {
	Op    Op
	Name  string
	Other string // the new name, of an operation on two
	Do    func() error
	Undo  func() // releases the result of a Do that succeeded; may be nil
}

// Told makes an operation with a result. With an error the result is the zero value.
func Told[T any](run func(Call) error, op Op, name string, do func() (T, error)) (T, error) {
	return got(run, op, name, nil, do)
}

// got makes an operation that has a result, which undo releases. If run returns an error, the operation may still be running, so
// its result is not read.
func got[T any](run func(Call) error, op Op, name string, undo func(T), do func() (T, error)) (T, error) {
	var value T
	c := Call{Op: op, Name: name, Do: func() (err error) { value, err = do(); return err }}
	if undo != nil {
		c.Undo = func() { undo(value) }
	}
	if err := run(c); err != nil {
		var none T
		return none, err
	}
	return value, nil
}

func (a *Around) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	return a.opened(name, func() (File, error) { return a.Inner.OpenFile(name, flag, perm) })
}

func (a *Around) opened(name string, open func() (File, error)) (File, error) {
	return got(a.Run, OpOpen, name, func(f File) { f.Close() }, open)
}

func (a *Around) Rename(oldname, newname string) error {
	return a.Run(Call{Op: OpRename, Name: oldname, Other: newname, Do: func() error { return a.Inner.Rename(oldname, newname) }})
}

func (a *Around) RenameNoReplace(oldname, newname string) error {
	return a.Run(Call{Op: OpPublish, Name: oldname, Other: newname,
		Do: func() error { return a.Inner.RenameNoReplace(oldname, newname) }})
}

func (a *Around) Link(oldname, newname string) error {
	return a.Run(Call{Op: OpLink, Name: oldname, Other: newname, Do: func() error { return a.Inner.Link(oldname, newname) }})
}

func (a *Around) Remove(name string) error {
	return a.Run(Call{Op: OpRemove, Name: name, Do: func() error { return a.Inner.Remove(name) }})
}

func (a *Around) Mkdir(name string, perm fs.FileMode) error {
	return a.Run(Call{Op: OpMkdir, Name: name, Do: func() error { return a.Inner.Mkdir(name, perm) }})
}

func (a *Around) MkdirAll(name string, perm fs.FileMode) error {
	return a.Run(Call{Op: OpMkdir, Name: name, Do: func() error { return a.Inner.MkdirAll(name, perm) }})
}

func (a *Around) ReadDir(name string) ([]fs.DirEntry, error) {
	return Told(a.Run, OpReadDir, name, func() ([]fs.DirEntry, error) { return a.Inner.ReadDir(name) })
}

func (a *Around) Stat(name string) (Info, error) {
	return Told(a.Run, OpStat, name, func() (Info, error) { return a.Inner.Stat(name) })
}

func (a *Around) SyncDir(name string) error {
	return a.Run(Call{Op: OpSyncDir, Name: name, Do: func() error { return a.Inner.SyncDir(name) }})
}

func (a *Around) SyncFS(name string) error {
	return a.Run(Call{Op: OpSyncFS, Name: name, Do: func() error { return a.Inner.SyncFS(name) }})
}

func (a *Around) Statfs(name string) (Space, error) {
	return Told(a.Run, OpStatfs, name, func() (Space, error) { return a.Inner.Statfs(name) })
}

func (a *Around) Lock(name string) (io.Closer, error) {
	return got(a.Run, OpLock, name, func(l io.Closer) { l.Close() }, func() (io.Closer, error) { return a.Inner.Lock(name) })
}
