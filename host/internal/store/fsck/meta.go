package fsck

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// maxMeta bounds what is read as a whole: a namespace's text, a plan.
const maxMeta = 4 << 20

// meta reads what the store keeps for itself: everything that it takes to judge pieces, and what the next start goes
// by.
func (c *check) meta() error {
	for _, dir := range pieceformat.Copies(pieceformat.NamespacesDir) {
		if err := c.each(dir, c.takeText); err != nil {
			return err
		}
	}
	for _, dir := range pieceformat.Copies(pieceformat.PlansDir) {
		if err := c.each(dir, c.takePlan); err != nil {
			return err
		}
	}
	c.judge(pieceformat.CheckpointFile, pieceformat.CheckCheckpoint)
	c.judge(pieceformat.StateFile, pieceformat.CheckState)
	if b, info, err := c.small(pieceformat.WrittenFile); err != nil {
		c.judgeMeta(pieceformat.WrittenFile, info, err)
	} else {
		_, _, err := pieceformat.DecodeWritten(b)
		c.judgeMeta(pieceformat.WrittenFile, info, err)
	}
	return nil
}

func (c *check) takeText(d kv.Digest, b []byte) error {
	c.kept.Lock()
	defer c.kept.Unlock()
	if kv.TextDigest(b) != d {
		return fmt.Errorf("%w: its digest is %s", pieceformat.ErrDamaged, kv.TextDigest(b))
	}
	if _, ok := c.texts[d]; ok {
		return nil
	}
	c.texts[d] = string(b)
	return nil
}

func (c *check) takePlan(d kv.Digest, b []byte) error {
	p, err := kv.DecodePlan(b)
	if err == nil && p.Digest() != d {
		err = fmt.Errorf("%w: its digest is %s", pieceformat.ErrDamaged, p.Digest())
	}
	if err != nil {
		return err
	}
	c.kept.Lock()
	defer c.kept.Unlock()
	c.plans[d] = p
	return nil
}

// text is a namespace's text. A namespace that is not known may have been opened since the check began: a host keeps the
// text before its first piece, so it is looked for again. A piece of a namespace with a text that cannot be read is no
// orphan.
func (c *check) text(d kv.Digest) (string, error) {
	known := func() (string, bool) {
		c.kept.Lock()
		defer c.kept.Unlock()
		text, ok := c.texts[d]
		return text, ok
	}
	if text, ok := known(); ok {
		return text, nil
	}
	b, err := c.copied(pieceformat.NamespacesDir, d)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: digest %s", errUnknownNamespace, d)
	}
	if err == nil {
		err = c.takeText(d, b)
	}
	if err != nil {
		return "", fmt.Errorf("fsck: the text of its namespace %s: %v", d, err) // not a judgement on the piece, whatever it is
	}
	return string(b), nil
}

// plan is likewise.
func (c *check) plan(d kv.Digest) (*kv.Plan, error) {
	known := func() *kv.Plan {
		c.kept.Lock()
		defer c.kept.Unlock()
		return c.plans[d]
	}
	if p := known(); p != nil {
		return p, nil
	}
	b, err := c.copied(pieceformat.PlansDir, d)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s", pieceformat.ErrUnknownPlan, d)
	}
	if err == nil {
		err = c.takePlan(d, b)
	}
	if err != nil {
		return nil, fmt.Errorf("fsck: its plan %s: %v", d, err)
	}
	return known(), nil
}

// copied reads a file that is there twice: the first copy that can be had.
func (c *check) copied(dir string, d kv.Digest) (b []byte, err error) {
	for _, dir := range pieceformat.Copies(dir) {
		if b, _, err = c.small(dir + "/" + d.String()); err == nil {
			break
		}
	}
	return b, err
}

// each goes through files that are named by the digest of what they hold.
func (c *check) each(dir string, take func(d kv.Digest, b []byte) error) error {
	list, err := c.entries(dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		rel := dir + "/" + e.Name()
		if _, temp := pieceformat.ParseTemp(e.Name()); temp {
			c.temporary(rel)
			continue
		}
		d, err := kv.ParseDigest(e.Name())
		if err != nil {
			c.foreign(rel)
			continue
		}
		b, info, err := c.small(rel)
		if err == nil {
			err = take(d, b)
		}
		c.judgeMeta(rel, info, err)
	}
	return nil
}

func (c *check) judgeMeta(rel string, info staging.Info, err error) {
	var path *fs.PathError
	p := Problem{Path: rel, Kind: Meta, Bytes: info.Allocated}
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return
	case errors.As(err, &path):
		p.Kind, p.What = Unreadable, err.Error()
	default:
		p.What = err.Error()
		c.takeOut(&p, info)
	}
	c.found(p)
}

func (c *check) small(rel string) ([]byte, staging.Info, error) {
	return pieceformat.ReadFile(c.o.FS, c.dir+"/"+rel, maxMeta)
}

// judge holds a file that is too large to keep against its checksums.
func (c *check) judge(rel string, how func(f io.ReaderAt, size int64) error) {
	f, err := c.o.FS.OpenFile(c.dir+"/"+rel, os.O_RDONLY, 0)
	if err != nil {
		c.judgeMeta(rel, staging.Info{}, err)
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil {
		err = how(f, info.Size)
	}
	c.judgeMeta(rel, info, err)
}

// entries are what a directory holds: nothing if it is not there. Something else in its place is a problem.
func (c *check) entries(rel string) ([]fs.DirEntry, error) {
	list, err := c.o.FS.ReadDir(c.dir + "/" + rel)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, unix.ENOTDIR):
		c.found(Problem{Path: rel, Kind: Unreadable, What: err.Error()})
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrRoot, err)
	}
	return list, nil
}
