package metamorphic

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

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
