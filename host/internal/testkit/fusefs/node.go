package fusefs

import (
	"context"
	"path"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// node is a file or a directory. Names in rules begin with '/' at the top of the mount.
type node struct {
	fs.LoopbackNode
	rules *faultfs.FS
}

// WrapChild makes the nodes below this one nodes of this package: the operations of a loopback node follow from its place.
func (n *node) WrapChild(context.Context, fs.InodeEmbedder) fs.InodeEmbedder {
	return &node{LoopbackNode: fs.LoopbackNode{RootData: n.RootData}, rules: n.rules}
}

func (n *node) name(child ...string) string {
	return path.Join("/", n.Path(n.Root()), path.Join(child...))
}

// call does an operation that a rule may fail, before or after it is done.
func (n *node) call(op staging.Op, name, other string, do func() syscall.Errno) syscall.Errno {
	ft := n.rules.Take(op, name, other)
	if ft.Errno == 0 {
		return do()
	}
	if ft.After {
		if errno := do(); errno != 0 {
			return errno
		}
	}
	return syscall.Errno(ft.Errno)
}

func (n *node) Statfs(ctx context.Context, out *fuse.StatfsOut) syscall.Errno {
	return n.call(staging.OpStatfs, n.name(), "", func() syscall.Errno { return n.LoopbackNode.Statfs(ctx, out) })
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (child *fs.Inode, errno syscall.Errno) {
	errno = n.call(staging.OpStat, n.name(name), "", func() (e syscall.Errno) {
		child, e = n.LoopbackNode.Lookup(ctx, name, out)
		return e
	})
	return child, errno
}

func (n *node) Getattr(ctx context.Context, f fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	return n.call(staging.OpStat, n.name(), "", func() syscall.Errno { return n.LoopbackNode.Getattr(ctx, f, out) })
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (child *fs.Inode, errno syscall.Errno) {
	errno = n.call(staging.OpMkdir, n.name(name), "", func() (e syscall.Errno) {
		child, e = n.LoopbackNode.Mkdir(ctx, name, mode, out)
		return e
	})
	return child, errno
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	return n.call(staging.OpRemove, n.name(name), "", func() syscall.Errno { return n.LoopbackNode.Rmdir(ctx, name) })
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	return n.call(staging.OpRemove, n.name(name), "", func() syscall.Errno { return n.LoopbackNode.Unlink(ctx, name) })
}

// Rename is a publication where it may replace nothing.
func (n *node) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, to string, flags uint32) syscall.Errno {
	op := staging.OpRename
	if flags&unix.RENAME_NOREPLACE != 0 {
		op = staging.OpPublish
	}
	other := path.Join("/", parent.EmbeddedInode().Path(n.Root()), to)
	return n.call(op, n.name(name), other, func() syscall.Errno { return n.LoopbackNode.Rename(ctx, name, parent, to, flags) })
}

func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (child *fs.Inode, errno syscall.Errno) {
	from := path.Join("/", target.EmbeddedInode().Path(n.Root()))
	errno = n.call(staging.OpLink, from, n.name(name), func() (e syscall.Errno) {
		child, e = n.LoopbackNode.Link(ctx, target, name, out)
		return e
	})
	return child, errno
}

func (n *node) OpendirHandle(ctx context.Context, flags uint32) (h fs.FileHandle, out uint32, errno syscall.Errno) {
	errno = n.call(staging.OpReadDir, n.name(), "", func() (e syscall.Errno) {
		h, out, e = n.LoopbackNode.OpendirHandle(ctx, flags)
		return e
	})
	return h, out, errno
}

// opened is the errno of a rule for an open of the file with the kernel's flags.
func (n *node) opened(name string, flags uint32) (ft faultfs.Fault) {
	if ft = n.rules.Take(staging.OpOpen, name, ""); ft.Errno == 0 && flags&unix.O_DIRECT != 0 {
		ft = n.rules.Take(staging.OpDirect, name, "")
	}
	return ft
}

// openFlags are what every file gets: nothing stays in the page cache, so that each transfer comes here.
const openFlags = fuse.FOPEN_DIRECT_IO

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if ft := n.opened(n.name(), flags); ft.Errno != 0 {
		return nil, 0, syscall.Errno(ft.Errno)
	}
	h, _, errno := n.LoopbackNode.Open(ctx, flags&^unix.O_DIRECT)
	if errno != 0 {
		return nil, 0, errno
	}
	return &handle{LoopbackFile: h.(*fs.LoopbackFile), n: n, direct: flags&unix.O_DIRECT != 0}, openFlags, 0
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	ft := n.opened(n.name(name), flags)
	if ft.Errno != 0 && !ft.After {
		return nil, nil, 0, syscall.Errno(ft.Errno)
	}
	child, h, _, errno := n.LoopbackNode.Create(ctx, name, flags&^unix.O_DIRECT, mode, out)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	file := h.(*fs.LoopbackFile)
	if ft.Errno != 0 {
		_ = file.Release(ctx)
		return nil, nil, 0, syscall.Errno(ft.Errno)
	}
	made := child.Operations().(*node)
	return child, &handle{LoopbackFile: file, n: made, direct: flags&unix.O_DIRECT != 0}, openFlags, 0
}

type handle struct {
	*fs.LoopbackFile
	n      *node
	direct bool
}

// PassthroughFd keeps the kernel from going past this package.
func (h *handle) PassthroughFd() (int, bool) { return 0, false }

// cut is how many of n bytes a fault leaves. A direct transfer that is cut stays aligned.
func (h *handle) cut(ft faultfs.Fault, n int) int {
	left := n / 2
	if ft.Bytes >= 0 {
		left = min(n, int(ft.Bytes))
	}
	if h.direct {
		left &^= staging.Align - 1
	}
	return left
}

func (h *handle) Read(ctx context.Context, p []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	ft := h.n.rules.Take(staging.OpRead, h.n.name(), "")
	if ft.Errno != 0 {
		return nil, syscall.Errno(ft.Errno)
	}
	r, errno := h.LoopbackFile.Read(ctx, p, off)
	if errno != 0 || !ft.Short && !ft.Torn {
		return r, errno
	}
	b, status := r.Bytes(p)
	if !status.Ok() {
		return nil, syscall.Errno(status)
	}
	switch left := h.cut(ft, len(b)); {
	case ft.Torn: // the rest is not what was written
		for i := left; i < len(b); i++ {
			b[i] ^= 0xa5
		}
	case left > 0: // nothing at all would be the end of the file
		b = b[:left]
	}
	return fuse.ReadResultData(b), 0
}

func (h *handle) Write(ctx context.Context, p []byte, off int64) (uint32, syscall.Errno) {
	ft := h.n.rules.Take(staging.OpWrite, h.n.name(), "")
	if ft.Errno != 0 && !ft.After {
		return 0, syscall.Errno(ft.Errno)
	}
	if left := h.cut(ft, len(p)); ft.Short && left > 0 {
		return h.LoopbackFile.Write(ctx, p[:left], off)
	} else if ft.Torn {
		if _, errno := h.LoopbackFile.Write(ctx, p[:left], off); errno != 0 {
			return 0, errno
		}
		return uint32(len(p)), 0
	}
	n, errno := h.LoopbackFile.Write(ctx, p, off)
	if errno == 0 && ft.Errno != 0 {
		return 0, syscall.Errno(ft.Errno)
	}
	return n, errno
}

func (h *handle) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	return h.n.call(staging.OpSync, h.n.name(), "", func() syscall.Errno { return h.LoopbackFile.Fsync(ctx, flags) })
}

func (h *handle) Allocate(ctx context.Context, off, size uint64, mode uint32) syscall.Errno {
	return h.n.call(staging.OpAllocate, h.n.name(), "", func() syscall.Errno { return h.LoopbackFile.Allocate(ctx, off, size, mode) })
}

func (h *handle) Flush(ctx context.Context) syscall.Errno {
	return h.n.call(staging.OpClose, h.n.name(), "", func() syscall.Errno { return h.LoopbackFile.Flush(ctx) })
}
