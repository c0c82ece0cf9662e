package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// fsNames maps magic numbers to names of file systems.
var fsNames = map[int64]string{
	unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs",
	unix.TMPFS_MAGIC:     "tmpfs",
	unix.NFS_SUPER_MAGIC: "nfs", unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.FUSE_SUPER_MAGIC: "fuse",
	unix.F2FS_SUPER_MAGIC: "f2fs",
	0x2fc12fc1:            "zfs", 0x0bd00bd0: "lustre", 0x00c36400: "ceph", 0x19830326: "beegfs", 0x47504653: "gpfs",
	0x19800202: "weka",
	0x858458f6: "ramfs", unix.BCACHEFS_SUPER_MAGIC: "bcachefs",
}

// probeBytes is the size of the probe's file. No device has a larger alignment.
const probeBytes = 64 << 10

// probeRoot tests a root with a file, and removes the file. If ask is not nil, it is called with the descriptor of the
// file while the file is open for direct I/O.
func (s system) probeRoot(path string, ask func(fd int) string) Root {
	r := Root{Path: path, Node: staging.NoNode, Direct: Unknown, NoReplace: Unknown}
	var err error
	if r.Tried, err = existing(path); err != nil {
		r.Failed = err.Error()
		return r
	}
	if abs, err := filepath.Abs(path); err == nil {
		r.Missing = abs != r.Tried
		if above := filepath.Dir(abs); r.Missing && above != r.Tried {
			r.Parent = above
		}
	}
	info, err := staging.OS().Stat(r.Tried)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s: %w", r.Tried, unix.ENOTDIR)
	}
	if err != nil {
		r.Failed = err.Error()
		return r
	}
	space, err := staging.OS().Statfs(r.Tried)
	if err != nil && !errors.Is(err, staging.ErrNoSize) {
		r.Failed = err.Error()
		return r
	}
	r.Total, r.Available = space.Total, space.Available
	if r.FS = fsNames[space.Type]; r.FS == "" {
		r.FS = fmt.Sprintf("%#x", space.Type)
	}
	if space.Type == unix.TMPFS_MAGIC {
		r.Mount, r.HugePages = s.tmpfs(r.Tried)
	}
	if r.Device = s.device(info.Dev); r.Parent != "" {
		return r // a file in another directory would prove nothing
	}
	r.Node, _ = staging.SystemTopology().NodeOfPath(r.Tried)
	r.Shared = sharedModels(path)
	name := filepath.Join(r.Tried, fmt.Sprintf(".kvhost-check-%d", os.Getpid()))
	if err := r.try(name, ask); err != nil {
		r.Failed = err.Error()
	}
	return r
}

// sharedModels lists the models in a root that engines of several tensor-parallel sizes share.
func sharedModels(root string) (list []SharedModel) {
	dir := filepath.Join(root, pieceformat.NamespacesDir)
	entries, _ := os.ReadDir(dir) // a root that no host has used has no such directory
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			continue
		}
		ns, err := kv.ParseNamespace(string(text))
		if err != nil || ns.Units == 0 {
			continue
		}
		if m := (SharedModel{ns.Model, ns.Units}); !slices.Contains(list, m) {
			list = append(list, m)
		}
	}
	return list
}

// tmpfs returns the mount point of a directory on tmpfs, and whether files there get huge pages regardless of the writer.
func (s system) tmpfs(dir string) (mount string, huge Answer) {
	huge = Unknown
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	for line := range strings.Lines(s.read("proc/self/mountinfo")) {
		f := strings.Fields(line) // id parent device root mount-point options [tags] - type source super-options
		sep := slices.Index(f, "-")
		if sep < 6 || len(f) < sep+4 || f[sep+1] != "tmpfs" {
			continue
		}
		at := mountName.Replace(f[4])
		if !(at == "/" || dir == at || strings.HasPrefix(dir, at+"/")) || len(at) < len(mount) {
			continue
		}
		mount, huge = at, No
		for option := range strings.SplitSeq(f[sep+3], ",") {
			if option == "huge=always" || option == "huge=within_size" {
				huge = Yes
			}
		}
	}
	switch global := s.read("sys/kernel/mm/transparent_hugepage/shmem_enabled"); { // it overrides the mount options
	case mount == "":
	case strings.Contains(global, "[force]"):
		huge = Yes
	case strings.Contains(global, "[deny]"):
		huge = No
	}
	return mount, huge
}

// mountName replaces the escapes of mountinfo.
var mountName = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// existing returns the directory itself, or the nearest existing directory above it.
func existing(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	for {
		_, err := os.Stat(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) || path == "/" {
			return path, err
		}
		path = filepath.Dir(path)
	}
}

// try creates the file and tests what it supports.
func (r *Root) try(name string, ask func(fd int) string) error {
	sys := staging.OS()
	f, err := sys.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	r.Writable = true
	other := name + ".2"
	switch err := unix.Renameat2(unix.AT_FDCWD, name, unix.AT_FDCWD, other, unix.RENAME_NOREPLACE); {
	case err == nil:
		r.NoReplace = Yes
		name = other
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
		r.NoReplace = No
	}
	defer os.Remove(name)
	var st unix.Statx_t
	if unix.Statx(unix.AT_FDCWD, name, 0, unix.STATX_DIOALIGN, &st) == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		r.MemAlign, r.OffAlign = int(st.Dio_mem_align), int(st.Dio_offset_align)
	}
	direct, err := sys.OpenFile(name, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		r.Direct = No
		return nil
	}
	defer direct.Close()
	buf, err := unix.Mmap(-1, 0, probeBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("map %d bytes: %w", probeBytes, err)
	}
	defer unix.Munmap(buf)
	for i := range buf {
		buf[i] = byte(i*7 + i>>8)
	}
	want := bytes.Clone(buf)
	if _, err := direct.WriteAt(buf, 0); err != nil {
		r.Direct = No
		return nil
	}
	clear(buf)
	if _, err := direct.ReadAt(buf, 0); err != nil {
		return fmt.Errorf("cannot read what was written with direct I/O: %w", err)
	}
	if !bytes.Equal(buf, want) {
		return fmt.Errorf("%s: %w", name, ErrBytes)
	}
	r.Direct = Yes
	if ask != nil {
		r.CuFile = ask(int(direct.Fd()))
	}
	return nil
}
