package storetest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// invariants checks what must hold between any two operations.
func (n *node) invariants() error {
	if n.died() {
		return nil // its files are not its own any more
	}
	k := &n.r.h.Kind
	if k.levels {
		if err := n.settle(); err != nil {
			return err
		}
	}
	if k.lives {
		return errors.Join(n.owed.update(n), n.store.Inspect(nil))
	}
	var err error
	ierr := n.store.Inspect(func(list []store.Inspection) {
		if k.hosts > 1 {
			var disk int64
			if disk, err = sharedUsage(n.cfg.Roots[0].Path); k.pauses {
				disk += namelessUsage(n.cfg.Roots[0].Path)
			}
			if err == nil && disk > n.cfg.Roots[0].Capacity {
				err = fmt.Errorf("%d bytes on disk, of %d", disk, n.cfg.Roots[0].Capacity)
			}
			return
		}
		err = n.checkRoots(list)
	})
	return errors.Join(ierr, err)
}

// settle waits until nothing moves between levels.
func (n *node) settle() error {
	if err := n.store.Settle(n.r.opt.Patience); err != nil {
		return fmt.Errorf("host %s: entries still move between levels: %w", n.ID, err)
	}
	return nil
}

// checkRoots compares roots that one host has with their disks.
func (n *node) checkRoots(list []store.Inspection) error {
	k := &n.r.h.Kind
	clean := n.r.rules == nil && !k.power && !k.many && !n.armed
	temporaries := 0
	for i, root := range list {
		capacity := n.cfg.Roots[i].Capacity
		disk, temps, err := usage(n.r.files, root.Dir)
		if err == nil && disk > min(root.Used, capacity) {
			var left int64
			left, err = foreign(n, root.Dir)
			disk -= left
		}
		temporaries += temps
		switch {
		case err != nil:
			return err
		case disk > capacity:
			return fmt.Errorf("root %d: %d bytes on disk, of %d; %+v", i, disk, capacity, root)
		case root.Used > capacity && clean:
			return fmt.Errorf("root %d: %d bytes used, of %d", i, root.Used, capacity)
		case disk > root.Used:
			return fmt.Errorf("root %d: %d bytes on disk, the account says %d", i, disk, root.Used)
		}
	}
	open := 0
	for _, p := range n.puts {
		if p.Temp() != "" {
			open++
		}
	}
	if clean && temporaries != open {
		return fmt.Errorf("%d temporaries, %d puts have one", temporaries, open)
	}
	return nil
}

// idle checks that nothing is pinned, being written or being removed.
func (n *node) idle() error {
	return n.eventually(func(list []store.Inspection) (err error) {
		for _, root := range list {
			if root.InUse != 0 {
				err = fmt.Errorf("host %s: %d entries of %s are in use, and nobody uses them", n.ID, root.InUse, root.Dir)
			}
		}
		return err
	})
}

// eventually checks what holds while the store does nothing.
func (n *node) eventually(check func([]store.Inspection) error) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	again := true // work can begin within a check: one that fails is repeated
	for ; ; <-tick.C {
		if n.r.h.Kind.levels {
			if err := n.settle(); err != nil {
				return err
			}
		}
		var err error
		ierr := n.store.Inspect(func(list []store.Inspection) { err = check(list) })
		if ierr != nil || err == nil || !again {
			return errors.Join(ierr, err)
		}
		again = false
	}
}

// converge lets hosts that share a root come to an agreement: one of them is the evictor, and all count what is there.
// It is false while one of them is closed.
func (r *runner) converge() (all bool, err error) {
	if r.h.Kind.hosts == 1 {
		return true, nil
	}
	for _, n := range r.nodes {
		if n.store == nil {
			return false, nil
		}
		if err := n.putBack(); err != nil {
			return false, err
		}
	}
	const enough = 60
	for range enough {
		r.nodes[0].turn()
	}
	disk, _, err := usage(r.files, r.nodes[0].cfg.Roots[0].Path) // credit covers temporaries
	if err != nil {
		return false, err
	}
	var evictors []string
	for _, n := range r.nodes {
		st := n.store.Stats().Roots[0]
		if st.Shared.State != shared.Active {
			return false, fmt.Errorf("host %s is in state %d after %d steps: %+v", n.ID, st.Shared.State, enough, *st.Shared)
		}
		if st.Shared.Evictor {
			evictors = append(evictors, n.ID)
		}
		if st.Used < disk { // it may be the evictor next, and grant the room
			return false, fmt.Errorf("host %s counts %d bytes, %d are on disk", n.ID, st.Used, disk)
		}
	}
	if len(evictors) != 1 {
		return false, fmt.Errorf("the evictors are %v, want one", evictors)
	}
	return true, nil
}

// compareAccounts compares what hosts reckon with with what is on disk. Nothing is under way.
func (r *runner) compareAccounts() error {
	n := r.nodes[0]
	if r.h.Kind.hosts > 1 {
		for _, n := range r.nodes {
			disk, err := sharedUsage(n.cfg.Roots[0].Path)
			if err != nil {
				return err
			}
			if st := n.store.Stats().Roots[0]; st.Shared.Evictor && st.Used != disk {
				return fmt.Errorf("the evictor %s reckons with %d bytes, %d are on disk", n.ID, st.Used, disk)
			}
		}
		return nil
	}
	return n.eventually(func(list []store.Inspection) (err error) {
		for i, root := range list {
			disk, temporaries, uerr := usage(n.r.files, root.Dir)
			left, ferr := foreign(n, root.Dir)
			want := disk - left + root.Missing
			err = errors.Join(err, uerr, ferr)
			capacity := n.cfg.Roots[i].Capacity
			if err == nil && (root.Used != want || temporaries != 0 || root.Used > capacity) {
				err = fmt.Errorf("root %d: the account says %d bytes of %d, the disk %d; %d temporaries",
					i, root.Used, capacity, want, temporaries)
			}
		}
		return err
	})
}

// frozenDisk adds up what a root takes on disk while no host can reserve anything, and no evictor removes files and grants
// their room: else a file that goes and one that comes in its place would both be counted.
func (r *runner) frozenDisk(root int) (disk int64, err error) {
	r.turns.Lock()
	defer r.turns.Unlock()
	measure := func([]store.Inspection) { disk, err = sharedUsage(r.nodes[0].cfg.Roots[root].Path) }
	for _, n := range r.nodes {
		inner := measure
		// What clients are in the middle of need not add up.
		measure = func([]store.Inspection) { _ = n.store.Inspect(inner) }
	}
	measure(nil)
	return disk, err
}

// usage adds up the blocks of all files outside the store's metadata, quarantine included, each file once. Files may go
// meanwhile, or be renamed.
func usage(fsys staging.FS, dir string) (bytes int64, temporaries int, err error) {
	seen := map[uint64]bool{}
	err = eachFile(fsys, dir, "", func(rel string, e fs.DirEntry) error {
		if strings.HasPrefix(rel, pieceformat.MetaDir) && !strings.HasPrefix(rel, pieceformat.QuarantineDir) {
			return nil
		}
		if isTemporary(e) {
			temporaries++
		}
		info, err := fsys.Stat(dir + "/" + rel)
		if err == nil && !seen[info.Ino] {
			seen[info.Ino] = true
			bytes += pieceformat.Padded(info.Allocated)
		}
		return err
	})
	return bytes, temporaries, err
}

// eachFile visits the files below a directory, by their names relative to top. Files and directories may go meanwhile.
func eachFile(fsys staging.FS, top, below string, visit func(rel string, e fs.DirEntry) error) error {
	list, err := fsys.ReadDir(filepath.Join(top, below))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range list {
		if err != nil {
			break
		}
		rel := filepath.Join(below, e.Name())
		if e.IsDir() {
			err = eachFile(fsys, top, rel, visit)
		} else if err = visit(rel, e); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	return err
}

// sharedUsage adds up pieces, temporaries and what is being removed on a shared root, each file once. Files may go
// meanwhile.
func sharedUsage(dir string) (bytes int64, err error) {
	seen := map[uint64]bool{}
	err = filepath.WalkDir(dir, func(name string, e os.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || e.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		counts := strings.Contains(rel, "/t/") || strings.Contains(rel, "/trash/") ||
			strings.HasPrefix(rel, pieceformat.QuarantineDir) || !strings.HasPrefix(rel, pieceformat.MetaDir)
		if !counts {
			return nil
		}
		info, err := staging.OS().Stat(name)
		if err == nil && !seen[info.Ino] {
			seen[info.Ino] = true
			bytes += pieceformat.Padded(info.Allocated)
		}
		return nil
	})
	return bytes, err
}

// namelessUsage adds up temporaries of a shared root that are open and have no name any more.
func namelessUsage(dir string) (bytes int64) {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	for _, e := range list {
		fd := "/proc/self/fd/" + e.Name()
		name, err := os.Readlink(fd)
		if err != nil || !strings.HasPrefix(name, dir+"/") || !strings.HasSuffix(name, ".tmp (deleted)") {
			continue
		}
		if info, err := staging.OS().Stat(fd); err == nil {
			bytes += pieceformat.Padded(info.Allocated)
		}
	}
	return bytes
}

func isTemporary(e fs.DirEntry) bool {
	_, temp := pieceformat.ParseTemp(e.Name())
	return temp
}

// noTemporaries checks that nothing was left half written.
func (r *runner) noTemporaries() error {
	for _, root := range r.nodes[0].cfg.Roots {
		err := eachFile(r.files, root.Path, "", func(rel string, e fs.DirEntry) error {
			if isTemporary(e) || strings.HasSuffix(rel, ".new") {
				return fmt.Errorf("left over: %s", rel)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// closeMemory checks that the memory in use is that of files, and frees it.
func (r *runner) closeMemory() error {
	if r.memory == nil {
		return nil
	}
	var files int64
	err := eachFile(r.memory, "/", "", func(rel string, _ fs.DirEntry) error {
		info, err := r.memory.Stat("/" + rel)
		files += info.Allocated
		return err
	})
	if used := r.memory.Stats().Used; err == nil && used != files {
		err = fmt.Errorf("%d bytes of memory are in use, %d are of files", used, files)
	}
	return errors.Join(err, r.memory.Close())
}

// runDamage changes a piece's file behind the stores' back.
func (n operator) runDamage(op Op) (string, error) {
	files, err := n.pieceFiles()
	if err != nil || len(files) == 0 {
		return "no file", err
	}
	name := files[op.number("file")%uint64(len(files))]
	if err := n.noteDamage(name); errors.Is(err, fs.ErrNotExist) {
		return "evicted meanwhile", nil
	} else if err != nil {
		return "", err
	}
	if filepath.Base(filepath.Dir(name)) == colliderDir {
		return "left alone", nil // without its header it is a foreign file, and without it another key's takes the name
	}
	at := int64(op.number("at"))
	switch op.get("how") {
	case "remove":
		err = n.r.files.Remove(name)
	case "cut":
		err = cut(n.r.files, name, at)
	default:
		err = overwrite(n.r.files, name, at, uint32(op.number("bytes")))
	}
	if errors.Is(err, fs.ErrNotExist) { // an eviction was faster
		return "evicted meanwhile", nil
	}
	rel, _ := filepath.Rel(n.dir, name)
	return rel, err
}

// noteDamage tells the model whose file is about to be damaged.
func (n *node) noteDamage(name string) error {
	b, err := readFile(n.r.files, name)
	if err != nil || len(b) < pieceformat.Page {
		return err
	}
	h, err := pieceformat.DecodeHeader(b[:pieceformat.Page])
	if err != nil {
		return nil // it was damaged before
	}
	for space := range namespaces {
		for key := range uint64(numKeys) {
			if namespaces[space].Digest() == h.Namespace && keyOf(key) == h.Key {
				n.r.model.setDamaged(Entry{space, key}, true)
			}
		}
	}
	return nil
}

// overwrite overwrites four bytes of a file, the last four where at is beyond them.
func overwrite(fsys staging.FS, name string, at int64, value uint32) error {
	f, err := fsys.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		b := []byte{byte(value), byte(value >> 8), byte(value >> 16), byte(value >> 24)}
		_, err = f.WriteAt(b, max(0, min(at, info.Size-int64(len(b)))))
	}
	return errors.Join(err, f.Close())
}

// cut makes a file at most n bytes long: one that grows would not be in the account.
func cut(fsys staging.FS, name string, n int64) error {
	b, err := readFile(fsys, name)
	if err != nil {
		return err
	}
	f, err := fsys.OpenFile(name, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b[:min(n, int64(len(b)))], 0)
	return errors.Join(err, f.Close())
}

// pieceFiles lists the files that hold pieces, by path.
func (n *node) pieceFiles() (names []string, err error) {
	for _, root := range n.cfg.Roots {
		err := eachFile(n.r.files, root.Path, "", func(rel string, e fs.DirEntry) error {
			if hidden := rel[0] == '.' || strings.Contains(filepath.Dir(rel), "/."); !hidden && !isTemporary(e) {
				names = append(names, filepath.Join(root.Path, rel))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return names, nil
}

// foreign adds up damaged files that the scan of a start left alone: no piece can be made out in them, and they have names
// that place policies gave. To a scan they are another program's, and not counted.
func foreign(n *node, dir string) (bytes int64, err error) {
	err = eachDamaged(n.r.files, dir, func(name, _ string, info staging.Info) {
		if ino, left := n.left[name]; left && ino == info.Ino {
			bytes += pieceformat.Padded(info.Allocated)
		}
	})
	return bytes, err
}

// noteLeft notes what the scans of a start left alone.
func noteLeft(n *node) error {
	for i, root := range n.store.Stats().Roots {
		if root.Scanned == 0 {
			continue
		}
		if n.left == nil {
			n.left = map[string]uint64{}
		}
		err := eachDamaged(n.r.files, n.cfg.Roots[i].Path, func(name, rel string, info staging.Info) {
			if !pieceformat.IsBuiltin([]byte(rel)) {
				n.left[name] = info.Ino
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// eachDamaged visits the files below a root that are damaged pieces, or none.
func eachDamaged(fsys staging.FS, dir string, visit func(name, rel string, info staging.Info)) error {
	return eachFile(fsys, dir, "", func(rel string, _ fs.DirEntry) error {
		name := dir + "/" + rel
		if strings.HasPrefix(rel, pieceformat.MetaDir) {
			return nil
		}
		if _, err := readHeader(fsys, name); !pieceformat.IsDamage(err) {
			return nil
		}
		info, err := fsys.Stat(name)
		if err == nil {
			visit(name, rel, info)
		}
		return err
	})
}

// readHeader reads a piece file's header and compares it with the file's size.
func readHeader(fsys staging.FS, name string) (pieceformat.Header, error) {
	b, err := readFile(fsys, name)
	if err != nil {
		return pieceformat.Header{}, err
	}
	h, err := pieceformat.DecodeHeader(b[:min(len(b), pieceformat.Page)])
	if err == nil && h.FileBytes() != int64(len(b)) {
		err = fmt.Errorf("%w: the file has %d bytes, its header says %d", pieceformat.ErrDamaged, len(b), h.FileBytes())
	}
	return h, err
}

// readFile reads a whole file.
func readFile(fsys staging.FS, name string) ([]byte, error) {
	f, err := fsys.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	b := make([]byte, info.Size)
	if err == nil {
		_, err = f.ReadAt(b, 0)
	}
	return b, errors.Join(err, f.Close())
}
