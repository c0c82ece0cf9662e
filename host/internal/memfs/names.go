package memfs

import (
	"io/fs"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// node is a file or a directory. FS.mu guards it, except what a file holds.
type node struct {
	inode    uint64
	mode     fs.FileMode
	children map[string]*node // of a directory
	links    int              // names
	opens    int              // open files
	locked   atomic.Bool
	modified atomic.Int64 // nanoseconds
	accessed atomic.Int64

	content
}

func (f *FS) newNode(mode fs.FileMode) *node {
	f.inode++
	n := &node{inode: f.inode, mode: mode}
	if mode.IsDir() {
		n.children = map[string]*node{}
	}
	at := now()
	n.modified.Store(at)
	n.accessed.Store(at)
	return n
}

func (n *node) isDir() bool { return n.children != nil }

// child returns what is under a name of a directory; n may be nil.
func (n *node) child(base string) *node {
	if n == nil {
		return nil
	}
	return n.children[base]
}

func (n *node) info(dev uint64) staging.Info {
	return staging.Info{Size: n.sized.Load(), Allocated: n.allocated.Load(), ModTime: time.Unix(0, n.modified.Load()),
		Accessed: time.Unix(0, n.accessed.Load()), Dev: dev, Ino: n.inode, Links: uint64(n.links), Mode: n.mode}
}

const longestName = 255

// component cuts the first component off a path. It is empty at the end of the path.
func component(path string) (base, rest string, err error) {
	for {
		path = strings.TrimLeft(path, "/")
		base, rest, _ = strings.Cut(path, "/")
		switch {
		case base == ".":
			path = rest
		case base == "..":
			return "", "", unix.EINVAL
		case len(base) > longestName:
			return "", "", unix.ENAMETOOLONG
		default:
			return base, rest, nil
		}
	}
}

// parent returns the directory of a name and the name's last component, which is empty for the top.
func (f *FS) parent(name string) (dir *node, base string, err error) {
	dir = f.root
	base, rest, err := component(name)
	for err == nil {
		var next string
		next, rest, err = component(rest)
		if err != nil || next == "" {
			break
		}
		below := dir.children[base]
		switch {
		case below == nil:
			return nil, "", unix.ENOENT
		case !below.isDir():
			return nil, "", unix.ENOTDIR
		}
		dir, base = below, next
	}
	if err != nil {
		return nil, "", err
	}
	return dir, base, nil
}

// find returns what is under a name.
func (f *FS) find(name string) (*node, error) {
	dir, base, err := f.parent(name)
	if err != nil {
		return nil, err
	}
	if base == "" {
		return dir, nil
	}
	if n := dir.children[base]; n != nil {
		return n, nil
	}
	return nil, unix.ENOENT
}

func (f *FS) link(dir *node, base string, n *node) {
	dir.children[base] = n
	dir.modified.Store(now())
	n.links++
}

func (f *FS) unlink(dir *node, base string) {
	n := dir.children[base]
	delete(dir.children, base)
	dir.modified.Store(now())
	n.links--
	f.reap(n)
}

// reap frees the memory of a file that nothing refers to.
func (f *FS) reap(n *node) {
	if n.links == 0 && n.opens == 0 && !n.isDir() {
		n.truncate(f.arena)
	}
}

// ReadDir implements [staging.FS].
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	dir, err := f.directory("readdir", name)
	if err != nil {
		return nil, err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	list := make([]fs.DirEntry, 0, len(dir.children))
	for base, n := range dir.children {
		list = append(list, fs.FileInfoToDirEntry(fileInfo{base, n.info(f.dev)}))
	}
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return list, nil
}

// fileInfo is a [staging.Info] as an [fs.FileInfo].
type fileInfo struct {
	name string
	info staging.Info
}

func (i fileInfo) Name() string       { return i.name }
func (i fileInfo) Size() int64        { return i.info.Size }
func (i fileInfo) Mode() fs.FileMode  { return i.info.Mode }
func (i fileInfo) ModTime() time.Time { return i.info.ModTime }
func (i fileInfo) IsDir() bool        { return i.info.IsDir() }
func (i fileInfo) Sys() any           { return nil }
