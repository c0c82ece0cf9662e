package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// Reader reads the disk of one root without changing it. A scan, a checkpoint and fsck all use it, so that they agree on the
// contents of a root.
type Reader struct {
	Path  string // absolute
	Slash string // Path and a slash
	FS    staging.FS
}

// NewReader returns a Reader. It does not access the disk.
func NewReader(fsys staging.FS, path string) Reader {
	return Reader{Path: path, Slash: path + "/", FS: fsys}
}

// By returns a reader of the same root that uses another file system.
func (d *Reader) By(fsys staging.FS) *Reader { return &Reader{Path: d.Path, Slash: d.Slash, FS: fsys} }

// FileKind is the kind of a file according to its name and type.
type FileKind uint8

// Kinds of files.
const (
	MayBePiece FileKind = iota
	Temporary           // temporary file of a put: see [pieceformat.ParseTemp]
	Foreign             // not a file of the store
)

// KindOf returns the kind of a file.
func KindOf(rel string, regular bool) FileKind {
	base := filepath.Base(rel)
	if _, temp := pieceformat.ParseTemp(base); temp {
		return Temporary
	} else if !regular || base[0] == '.' {
		return Foreign
	}
	return MayBePiece
}

// Walk calls visit for every file below a directory of the root, on several goroutines. dir is empty or ends with a slash.
// Paths are relative to the root. skipped gets directories that cannot be read, and other roots with [staging.ErrForeign].
func (d *Reader) Walk(
	ctx context.Context, dir string, workers int, visit func(rel string, is FileKind), skipped func(rel string, err error),
) error {
	return staging.Walk(ctx, d.FS, strings.TrimSuffix(d.Slash+dir, "/"), pieceformat.MetaDir, workers, func(rel string, e fs.DirEntry) {
		visit(dir+rel, KindOf(rel, e.Type().IsRegular()))
	}, func(rel string, err error) { skipped(dir+rel, err) })
}

// Look reads the header of a file.
func (d *Reader) Look(name string) (pieceformat.Header, staging.Info, error) {
	f, err := d.FS.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return pieceformat.Header{}, staging.Info{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return pieceformat.Header{}, info, err
	}
	var page [pieceformat.Page]byte
	n, err := f.ReadAt(page[:min(info.Size, pieceformat.Page)], 0)
	if err != nil && n < pieceformat.Page && err != io.EOF {
		return pieceformat.Header{}, info, err // this error says nothing about the content of the file
	}
	h, err := Head(page[:n], info)
	return h, info, err
}

// Head decodes the first page of a file and compares the header with the file's size.
func Head(page []byte, info staging.Info) (h pieceformat.Header, err error) {
	if h, err = pieceformat.DecodeHeader(page); err == nil && h.FileBytes() != info.Size {
		err = fmt.Errorf("%w: the file has %d bytes, its header says %d", pieceformat.ErrDamaged, info.Size, h.FileBytes())
	}
	return h, err
}

// Blank reports whether a file has room for a piece, and a first page that was never written.
func (d *Reader) Blank(name string) bool {
	f, err := d.FS.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	var page [pieceformat.Page]byte
	n, err := f.ReadAt(page[:], 0)
	return (err == nil || err == io.EOF) && IsBlank(page[:n])
}

// IsBlank reports whether the first page of a file was never written, as after a power failure.
func IsBlank(page []byte) bool {
	return len(page) == pieceformat.Page && [pieceformat.Page]byte(page) == [pieceformat.Page]byte{}
}

// maxWhole is the largest size of a file that is read at once: a namespace's text or a plan.
const maxWhole = 4 << 20

// Read reads a whole file, given its path below the root.
func (d *Reader) Read(rel string) ([]byte, staging.Info, error) {
	return pieceformat.ReadFile(d.FS, d.Slash+rel, maxWhole)
}

// Open opens a file, calls read, and closes the file.
func (d *Reader) Open(rel string, read func(f staging.File, info staging.Info) error) error {
	f, err := d.FS.OpenFile(d.Slash+rel, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		err = read(f, info)
	}
	return errors.Join(err, f.Close())
}

// Text reads the text of a namespace. The error is [fs.ErrNotExist] if the root does not hold the text. An error together with
// a text means that one of its two copies is missing or damaged.
func (d *Reader) Text(digest kv.Digest) (text []byte, err error) {
	return d.copied(pieceformat.NamespacesDir, digest, func(b []byte) error { return pieceformat.CheckText(digest, b) })
}

// Plan reads a plan and its encoding. Errors are as for Text.
func (d *Reader) Plan(digest kv.Digest) (plan *kv.Plan, b []byte, err error) {
	b, err = d.copied(pieceformat.PlansDir, digest, func(b []byte) error {
		p, err := pieceformat.DecodePlan(digest, b)
		if err == nil {
			plan = p
		}
		return err
	})
	return plan, b, err
}

// copied reads a file that has two copies.
func (d *Reader) copied(dir string, digest kv.Digest, judge func([]byte) error) (data []byte, err error) {
	for _, dir := range pieceformat.Copies(dir) {
		b, _, bad := d.Read(dir + "/" + digest.String())
		if bad == nil {
			bad = judge(b)
		}
		switch {
		case bad == nil:
			data = b
		case err == nil || errors.Is(err, fs.ErrNotExist):
			err = bad
		}
	}
	return data, err
}
