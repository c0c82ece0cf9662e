package shared

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// world is a file system in memory that several hosts share, and the scheduler of the hosts' threads, whose operations are those on it.
type world struct {
	*scheduler.Scheduler
	files  map[string]*inode
	dirs   map[string]bool
	inos   uint64
	open   map[*memFile]bool
	faulty bool                                                        // operations of steps fail now and then
	check  func(t *scheduler.Thread, op string, names ...string) error // before each operation
	after  func() error
	fault  error // what must hold and did not
}

type inode struct {
	ino   uint64
	data  []byte
	size  int64 // on disk
	links int
	late  int // writes since it has no name
	mod   time.Duration
}

func newWorld(seed uint64) *world {
	w := &world{
		Scheduler: scheduler.New(seed, 9, time.Millisecond), files: map[string]*inode{}, dirs: map[string]bool{"/r": true, "/r/p": true},
		open: map[*memFile]bool{},
	}
	w.after = w.capacity
	return w
}

func (w *world) join(n *node, c *Config) { n.files, c.Dir, c.LogBytes = hostFS{n, w}, "/r", 2000 }

func (w *world) path(k kv.Key) string { return fmt.Sprintf("/r/p/%d", k[0]) }

func (w *world) size(k kv.Key) (int64, bool) {
	if f := w.files[w.path(k)]; f != nil {
		return f.size, true
	}
	return 0, false
}

func (w *world) promises(n *node) bool { return w.dirs["/r/"+Dir+"/hosts/"+n.name] }

func (w *world) fails(t *scheduler.Thread) bool {
	n, ok := t.Process.(*node)
	return w.faulty && ok && t == n.h
}

// leases: nobody who is counted on holds a lease on what the evictor removes.
func (w *world) leases(nodes []*node, h *scheduler.Thread, op string, names ...string) error {
	if op != "rename" || !strings.HasPrefix(names[0], "/r/p/") || w.files[names[0]] == nil || !w.dirs[path.Dir(names[1])] {
		return nil // nothing is removed, or the evictor was given up
	}
	for _, n := range nodes {
		if n.h.Ended || n.Member == nil || !w.promises(n) {
			continue
		}
		for k, i := range n.index {
			if w.path(k) == names[0] && i.leases > 0 {
				return fmt.Errorf("%s removes %s, which %s has leased", h.ID, names[0], n.h.ID)
			}
		}
	}
	return nil
}

// total is the bytes of pieces, temporaries and trash, and of files that are open and have no name any more, but for the
// one write to such a file that was under way.
func (w *world) total() (sum int64) {
	seen := map[*inode]bool{}
	add := func(n *inode) {
		if !seen[n] && (n.links > 0 || n.late == 0) {
			sum += n.size
		}
		seen[n] = true
	}
	for _, n := range w.files {
		add(n)
	}
	for f := range w.open {
		add(f.inode)
	}
	return sum
}

func (w *world) capacity() error {
	if sum := w.total(); sum > modelCapacity {
		return fmt.Errorf("%d bytes on disk, the capacity is %d", sum, modelCapacity)
	}
	return nil
}

func (w *world) ends(nodes []*node) error {
	var left []string
	for name := range w.files {
		if strings.Contains(name, "/t/") {
			left = append(left, name)
		}
	}
	for _, dir := range w.under("/r/" + Dir) {
		if dir[0] == 'x' || dir[0] == 'c' {
			left = append(left, dir)
		}
	}
	if left = append(left, w.under("/r/"+Dir+"/gone")...); len(left) > 0 {
		return fmt.Errorf("left: %v", left)
	}
	for _, n := range nodes {
		for num := range modelKeys {
			k := modelKey(num)
			if size, there := w.size(k); there != n.index[k].grantable() && size > 0 {
				return fmt.Errorf("%s has %+v of %d, on disk: %t", n.h.ID, n.index[k], num, there)
			}
		}
	}
	return nil
}

// Kill ends a process. Its files are closed.
func (w *world) Kill(proc any) {
	w.Scheduler.Kill(proc)
	for f := range w.open {
		if f.proc == proc {
			delete(w.open, f)
		}
	}
}

// hostFS is the file system as the threads of one process see it.
type hostFS struct {
	proc any
	w    *world
}

func (f hostFS) begin(op string, names ...string) error {
	h := f.w.At
	h.Yield()
	f.w.Note(h, "%s %s", op, strings.ReplaceAll(strings.Join(names, " "), "/r/.kvhost/shared", ""))
	if f.w.check != nil {
		if err := f.w.check(h, op, names...); err != nil {
			f.w.fault = errors.Join(f.w.fault, err)
		}
	}
	return nil
}

func pathErr(op, name string, err error) error { return &fs.PathError{Op: op, Path: name, Err: err} }

func (f hostFS) OpenFile(name string, flag int, _ fs.FileMode) (staging.File, error) {
	f.begin("open", name)
	if err := f.try(pathErr("open", name, unix.EIO), func() error { return nil }); err != nil {
		return nil, err
	}
	n := f.w.files[name]
	if n == nil {
		if flag&0x40 == 0 || !f.w.dirs[path.Dir(name)] { // O_CREAT
			return nil, pathErr("open", name, fs.ErrNotExist)
		}
		f.w.inos++
		n = &inode{ino: f.w.inos, links: 1, mod: f.w.Now}
		f.w.files[name] = n
	} else if flag&0x80 != 0 { // O_EXCL
		return nil, pathErr("open", name, fs.ErrExist)
	}
	if flag&0x200 != 0 { // O_TRUNC
		n.data, n.size = nil, 0
	}
	file := &memFile{hostFS: f, name: name, inode: n}
	f.w.open[file] = true
	return file, nil
}

type memFile struct {
	hostFS
	name  string
	inode *inode
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	f.begin("read", f.name)
	if err := f.try(pathErr("read", f.name, unix.ESTALE), func() error { return nil }); err != nil {
		return 0, err
	}
	if off >= int64(len(f.inode.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.inode.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	f.begin("write", f.name)
	f.written()
	if err := f.try(pathErr("write", f.name, unix.EIO), func() error { return nil }); err != nil {
		return 0, err
	}
	if need := int(off) + len(p); need > len(f.inode.data) {
		f.inode.data = append(f.inode.data, make([]byte, need-len(f.inode.data))...)
	}
	copy(f.inode.data[off:], p)
	f.inode.mod = f.w.Now
	return len(p), f.done()
}

func (f *memFile) Allocate(n int64) error {
	f.begin("allocate", f.name)
	f.written()
	f.inode.size = max(n, f.inode.size)
	return f.done()
}

// written notes a write. To a file without a name it was under way when the name went; another must not follow.
func (f *memFile) written() {
	if f.inode.links > 0 || !strings.Contains(f.name, "/t/") {
		return
	}
	if f.inode.late++; f.inode.late > 1 {
		f.w.fault = errors.Join(f.w.fault, fmt.Errorf("%s writes on to %s, which has no name", f.w.At.ID, f.name))
	}
}

func (f *memFile) Close() error {
	delete(f.w.open, f)
	return nil
}

func (f *memFile) Stat() (staging.Info, error) { return f.inode.info(), nil }
func (f *memFile) Name() string                { return f.name }
func (f *memFile) Direct() bool                { return false }
func (f *memFile) Fd() uintptr                 { return 0 }
func (f *memFile) Datasync() error             { return nil }

func (n *inode) info() staging.Info {
	return staging.Info{
		Size: int64(len(n.data)), Allocated: n.size, Ino: n.ino, Links: uint64(n.links), ModTime: time.Unix(0, int64(n.mod)),
	}
}

// done looks at the world after an operation that changed it.
func (f hostFS) done() error {
	if f.w.after != nil {
		if err := f.w.after(); err != nil {
			f.w.fault = errors.Join(f.w.fault, err)
		}
	}
	return nil
}

// try does an operation. One of a step may report an error instead, or besides.
func (f hostFS) try(cause error, do func() error) error {
	if f.w.fails(f.w.At) {
		switch f.w.Rng.IntN(200) {
		case 0:
			f.w.Note(f.w.At, "FAILS")
			return cause
		case 1:
			f.w.Note(f.w.At, "FAILS afterwards")
			return errors.Join(do(), cause)
		}
	}
	return do()
}

func (f hostFS) Rename(from, to string) error {
	f.begin("rename", from, to)
	return f.try(pathErr("rename", from, unix.EIO), func() error { return f.rename(from, to) })
}

func (f hostFS) rename(from, to string) error {
	w := f.w
	if !w.dirs[path.Dir(to)] {
		return pathErr("rename", to, fs.ErrNotExist)
	}
	if n := w.files[from]; n != nil {
		if old := w.files[to]; old != nil {
			if old == n {
				return nil
			}
			old.links--
		}
		w.files[to] = n
		delete(w.files, from)
		return f.done()
	}
	if !w.dirs[from] {
		return pathErr("rename", from, fs.ErrNotExist)
	}
	if w.dirs[to] && len(w.under(to)) > 0 {
		return pathErr("rename", to, fs.ErrExist)
	}
	move := func(name string) string { return to + strings.TrimPrefix(name, from) }
	for name, n := range maps.Clone(w.files) {
		if strings.HasPrefix(name, from+"/") {
			w.files[move(name)] = n
			delete(w.files, name)
		}
	}
	for name := range maps.Clone(w.dirs) {
		if name == from || strings.HasPrefix(name, from+"/") {
			w.dirs[move(name)] = true
			delete(w.dirs, name)
		}
	}
	return f.done()
}

func (w *world) under(dir string) []string {
	var names []string
	for name := range w.files {
		if path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	for name := range w.dirs {
		if path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	slices.Sort(names)
	return names
}

func (f hostFS) RenameNoReplace(from, to string) error {
	return pathErr("rename", to, errors.ErrUnsupported)
}

func (f hostFS) Link(from, to string) error {
	f.begin("link", from, to)
	n := f.w.files[from]
	if n == nil || !f.w.dirs[path.Dir(to)] {
		return pathErr("link", from, fs.ErrNotExist)
	}
	if f.w.files[to] != nil {
		return pathErr("link", to, fs.ErrExist)
	}
	n.links++
	f.w.files[to] = n
	return f.done()
}

func (f hostFS) Remove(name string) error {
	f.begin("remove", name)
	return f.try(pathErr("remove", name, unix.EIO), func() error { return f.remove(name) })
}

func (f hostFS) remove(name string) error {
	w := f.w
	if n := w.files[name]; n != nil {
		n.links--
		delete(w.files, name)
		return f.done()
	}
	if !w.dirs[name] {
		return pathErr("remove", name, fs.ErrNotExist)
	}
	if len(w.under(name)) > 0 {
		return pathErr("remove", name, fs.ErrExist)
	}
	delete(w.dirs, name)
	return nil
}

func (f hostFS) Mkdir(name string, _ fs.FileMode) error {
	f.begin("mkdir", name)
	if !f.w.dirs[path.Dir(name)] {
		return pathErr("mkdir", name, fs.ErrNotExist)
	}
	if f.w.dirs[name] || f.w.files[name] != nil {
		return pathErr("mkdir", name, fs.ErrExist)
	}
	f.w.dirs[name] = true
	return nil
}

func (f hostFS) MkdirAll(name string, _ fs.FileMode) error {
	f.begin("mkdir", name)
	for d := name; d != "/" && d != "."; d = path.Dir(d) {
		f.w.dirs[d] = true
	}
	return nil
}

func (f hostFS) ReadDir(name string) ([]fs.DirEntry, error) {
	f.begin("readdir", name)
	if !f.w.dirs[name] {
		return nil, pathErr("readdir", name, fs.ErrNotExist)
	}
	var list []fs.DirEntry
	for _, base := range f.w.under(name) {
		list = append(list, memEntry{base, f.w.dirs[name+"/"+base]})
	}
	return list, f.try(pathErr("readdir", name, unix.ESTALE), func() error { return nil })
}

type memEntry struct {
	name string
	dir  bool
}

func (e memEntry) Name() string               { return e.name }
func (e memEntry) IsDir() bool                { return e.dir }
func (e memEntry) Type() fs.FileMode          { return 0 }
func (e memEntry) Info() (fs.FileInfo, error) { return nil, errors.ErrUnsupported }

func (f hostFS) Stat(name string) (staging.Info, error) {
	f.begin("stat", name)
	if strings.HasPrefix(name, "/r/.kvhost/") { // what a store makes of its pieces the model does not know
		if err := f.try(pathErr("stat", name, unix.EIO), func() error { return nil }); err != nil {
			return staging.Info{}, err
		}
	}
	if n := f.w.files[name]; n != nil {
		return n.info(), nil
	}
	if f.w.dirs[name] {
		return staging.Info{Mode: fs.ModeDir}, nil
	}
	return staging.Info{}, pathErr("stat", name, fs.ErrNotExist)
}

func (f hostFS) SyncDir(string) error                 { return nil }
func (f hostFS) SyncFS(string) error                  { return nil }
func (f hostFS) Statfs(string) (staging.Space, error) { return staging.Space{}, nil }
func (f hostFS) Lock(string) (io.Closer, error)       { return nil, errors.ErrUnsupported }
