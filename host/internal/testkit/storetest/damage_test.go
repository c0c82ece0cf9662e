package storetest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

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
