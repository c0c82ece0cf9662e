package fsck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// verdict is the result of reading a file.
type verdict struct {
	header   pieceformat.Header
	info     staging.Info
	read     int64
	misnamed bool // set if the file's name differs from the one in its header
	blank    bool // set if the first page is all zeros
}

// unchanged reports whether a and b describe the same file, with no write between them.
func unchanged(a, b staging.Info) bool {
	return a.Same(b) && a.Size == b.Size && a.ModTime.Equal(b.ModTime)
}

// settled verifies a file until it is sound, or until two reads in a row found it bad and unchanged. It returns errChanging if
// the file keeps changing.
func (c *check) settled(ctx context.Context, rel string, buf []byte) (verdict, error) {
	last, err := c.verify(ctx, rel, buf)
	for range 3 {
		if err == nil || !bad(err) || ctx.Err() != nil {
			return last, err
		}
		v, again := c.verify(ctx, rel, buf)
		if bad(again) && unchanged(v.info, last.info) {
			return v, again
		}
		last, err = v, again
	}
	if bad(err) {
		err = errChanging
	}
	return last, err
}

// bad reports whether an error is a verdict on the file, on which a repair may act.
func bad(err error) bool {
	for _, e := range [...]error{
		pieceformat.ErrWrongPiece, kv.ErrChecksum, errUnknownNamespace, pieceformat.ErrUnknownPlan,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return pieceformat.IsDamage(err)
}

// verify reads a file from its header to its last extent.
func (c *check) verify(ctx context.Context, rel string, buf []byte) (v verdict, err error) {
	f, err := staging.OpenDirect(c.o.FS, c.dir+"/"+rel, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return v, err
	}
	defer f.Close()
	// A host does not unlink a locked file, because the bytes would still be allocated but not counted.
	locked := staging.LockFile(f, unix.LOCK_SH)
	if v.info, err = f.Stat(); err != nil {
		return v, err
	}
	if locked != nil || f.Fd() != staging.NoFd && v.info.Links == 0 {
		return v, fmt.Errorf("%w: its host removes it", fs.ErrNotExist)
	}
	n, err := c.read(ctx, f, buf[:pieceformat.Page], 0, &v)
	if err != nil {
		return v, err
	}
	if v.header, err = files.Head(buf[:n], v.info); err != nil {
		v.blank = files.IsBlank(buf[:n])
		return v, err
	}
	h := &v.header
	text, err := c.text(h.Namespace)
	if err != nil {
		return v, err
	}
	builtin := pieceformat.AppendBuiltin(nil, h.Namespace, pieceformat.KeyLen(text), &h.Key, h.Group, h.Rank)
	if v.misnamed = rel != cmp.Or(h.Name, string(builtin)); rel != string(builtin) && pieceformat.Reserved([]byte(rel)) {
		return v, fmt.Errorf("%w: key %s of group %d, rank %d, namespace %s under the built-in name of another",
			pieceformat.ErrWrongPiece, h.Key, h.Group, h.Rank, h.Namespace)
	}
	plan, err := c.plan(h.Plan)
	if err != nil {
		return v, err
	}
	if err := h.Fits(plan); err != nil || c.o.Quick {
		return v, err
	}
	return v, c.payload(ctx, f, plan, buf, &v)
}

// payload verifies the table and each extent: the stored bytes, and the decoded pages.
func (c *check) payload(ctx context.Context, f staging.File, plan *kv.Plan, buf []byte, v *verdict) error {
	h := &v.header
	n, err := c.read(ctx, f, buf[:h.DataOffset], 0, v)
	if err != nil {
		return err
	}
	var head moves.Head
	if err := head.Read(h, plan, buf[:n]); err != nil {
		return err
	}
	if head.Table == nil {
		return fmt.Errorf("%w: it ends at byte %d", pieceformat.ErrDamaged, n)
	}
	var page []byte // buffer for a decoded extent; nil unless the piece is compressed
	if head.Compressed {
		page = make([]byte, kv.ExtentBytes)
	}
	extents := plan.Extents()
	for lo := 0; lo < len(extents); {
		start, end := head.At(lo)
		base := start &^ (staging.Align - 1)
		hi := lo + 1 // An extent is far smaller than the buffer.
		for ; hi < len(extents); hi++ {
			_, next := head.At(hi)
			if pieceformat.Padded(next)-base > int64(len(buf)) {
				break
			}
			end = next
		}
		part := buf[:pieceformat.Padded(end)-base]
		if n, err = c.read(ctx, f, part, base, v); err != nil {
			return err
		}
		if n < len(part) {
			return fmt.Errorf("%w: it ends at byte %d", pieceformat.ErrDamaged, base+int64(n))
		}
		if err := head.Verify(lo, hi, part, base); err != nil {
			return err
		}
		for ; lo < hi; lo++ {
			if from, to := head.At(lo); head.Compressed {
				if err := head.Decode(lo, page[:extents[lo].Len], part[from-base:to-base]); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (c *check) read(ctx context.Context, f staging.File, p []byte, off int64, v *verdict) (int, error) {
	c.bytes.Add(int64(len(p)))
	if err := c.rate.Take(ctx, len(p)); err != nil {
		return 0, err
	}
	n, err := f.ReadAt(p, off)
	v.read += int64(n)
	if err == io.EOF {
		err = nil
	}
	return n, err
}
