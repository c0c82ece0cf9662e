package store

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// Piece is a published file that is open for reading. It pins its entry until it is closed.
type Piece struct {
	root   *root
	class  *catalog.Class
	mark   entries.Mark
	key    kv.Key
	rank   uint32
	given  string // name below the root if it is not the built-in one
	name   string // path of the file
	file   staging.File
	size   int64
	head   Head
	isLoad bool               // moves wait while the piece is open
	move   *entries.Move      // the move that reads the piece, or nil
	header pieceformat.Header // set by Verify
	nearer sync.Once          // decides once whether the piece is copied nearer during the load
	copied *nearing           // nil if it is not
	closed atomic.Bool
}

// Head is the information before the payload that a reader needs.
type Head = moves.Head

// pin pins the piece's entry. The caller must have another pin on it.
func (p *Piece) pin() error {
	at, ok := p.root.PinPiece(p.mark.Slot, p.rank, p.move)
	if !ok {
		return fmt.Errorf("%w: rank %d of %s", ErrGone, p.rank, at.Key)
	}
	p.key, p.class, p.given = at.Key, at.Class, at.Name
	return nil
}

func (p *Piece) open() (err error) {
	r := p.root
	p.name = r.path(p.given, p.class, &p.key, p.rank)
	if err = p.openFile(); errors.Is(err, unix.ESTALE) {
		err = p.openFile() // once, since the name may have a new file handle
	}
	if err != nil {
		return fmt.Errorf("store: opening rank %d of %s: %w", p.rank, p.key, r.unopened(p.mark, p.rank, p.name, err))
	}
	p.file = r.metered(p.file)
	return nil
}

// openFile opens the file with the piece's name. A directory is reported as EISDIR, so that it is not taken for a damaged file.
func (p *Piece) openFile() error {
	f, err := staging.OpenDirect(p.root.FS, p.name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		err = fmt.Errorf("%s: %w", p.name, unix.EISDIR)
	} else if err == nil && info.Size > p.class.Bound() { // readers allocate memory for that size at most
		err = fmt.Errorf("%w: %s has %d bytes", pieceformat.ErrDamaged, p.name, info.Size)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	p.file, p.size = f, info.Size
	return nil
}

// Pause closes the file and keeps the pin. Resume opens the file again.
func (p *Piece) Pause() {
	_ = p.file.Close() // an error has no consequence, as the file was only read
	p.file = nil
}

// Resume opens the file of a paused piece. The result of Verify stays valid, because the entry is pinned and pieces are
// immutable.
func (p *Piece) Resume() error { return p.open() }

// Root returns the path of the root that holds the piece.
func (p *Piece) Root() string { return p.root.Path }

// Size returns the size of the file.
func (p *Piece) Size() int64 { return p.size }

// Expected returns the probable head of the piece, without its table: the head that a piece would have if it were written now.
// Verify returns the real one.
func (p *Piece) Expected() Head {
	plan := p.class.Plan
	compressed := p.size != pieceformat.FileBytes(plan)
	return Head{Plan: plan, DataOffset: pieceformat.DataOffset(len(plan.Extents()), compressed), Compressed: compressed}
}

// Decoded records the bytes that were decompressed and the time of the codec.
func (p *Piece) Decoded(pages, stored int64, took time.Duration) {
	p.class.Namespace.Compression.Decoded(pages, stored, took)
}

// File returns the open file. The piece closes it.
func (p *Piece) File() staging.File { return p.file }

// Verify checks the file by its first bytes, of which head must hold at least one [pieceformat.Page]: that it is the expected
// piece, that it is complete, and how it is to be read. If head has fewer than Head.DataOffset bytes, the table is not read,
// and Verify must be called again with more. The result is valid until Close.
func (p *Piece) Verify(head []byte) (*Head, error) {
	h, err := pieceformat.DecodeHeader(head)
	if err != nil {
		return nil, err
	}
	if err := p.expects(&h); err != nil {
		return nil, err
	}
	plan := p.class.Plan
	if h.Plan != plan.Digest() {
		if plan, err = p.root.kept.Plan(h.Plan); err != nil {
			return nil, err
		}
		if !plan.Geometry().Equal(p.class.Plan.Geometry()) {
			return nil, fmt.Errorf("%w: plan %s is of another geometry", pieceformat.ErrWrongPiece, h.Plan)
		}
	}
	if err := h.Fits(plan); err != nil {
		return nil, err
	}
	if err := p.head.Read(&h, plan, head); err != nil {
		return nil, err
	}
	p.header = h
	return &p.head, nil
}

// expects compares a header with the piece in the index.
func (p *Piece) expects(h *pieceformat.Header) error {
	c := p.class
	switch {
	case h.Namespace != c.Namespace.Digest:
		return fmt.Errorf("%w: of namespace %s, want %s", pieceformat.ErrWrongPiece, h.Namespace, c.Namespace.Digest)
	case h.Key != p.key:
		return fmt.Errorf("%w: of key %s, want %s", pieceformat.ErrWrongPiece, h.Key, p.key)
	case h.Group != c.Group || h.Rank != p.rank:
		return fmt.Errorf("%w: group %d rank %d, want %d and %d", pieceformat.ErrWrongPiece, h.Group, h.Rank, c.Group, p.rank)
	case h.Extent != kv.ExtentBytes:
		return fmt.Errorf("%w: extents of %d bytes", pieceformat.ErrUnknownFormat, h.Extent)
	case h.FileBytes() != p.size:
		return fmt.Errorf("%w: the file has %d bytes, its header says %d", pieceformat.ErrDamaged, p.size, h.FileBytes())
	}
	return nil
}

// Bad reports that the bytes of a piece are wrong or could not be read. The entry is dropped at once, so that the next lookup
// misses, and the file goes to quarantine. Neither happens if the cause is a temporary condition.
func (p *Piece) Bad(cause error) {
	if p.root.spares(p.mark, p.name, cause) {
		return
	}
	p.root.dropDamaged(p.mark, p.rank, p.name, cause)
}

// Close closes the file and ends the pin. It may be called more than once.
func (p *Piece) Close() {
	if p.closed.Swap(true) {
		return
	}
	if p.copied != nil {
		p.copied.end()
	}
	if p.file != nil {
		_ = p.file.Close() // an error has no consequence, as the file was only read
	}
	p.root.UnpinPiece(p.mark, p.move)
	if p.isLoad {
		p.root.store.loads.End()
	}
}
