package fsck

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// meta reads the metadata files of the store: the texts and plans that are needed to check pieces, and the files that the next
// start reads.
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
	c.judge(pieceformat.CheckpointFile, func(f io.ReaderAt, size int64) error {
		_, err := pieceformat.ReadCheckpoint(f, size, unused{})
		return err
	})
	c.judge(pieceformat.StateFile, pieceformat.CheckState)
	b, info, err := c.disk.Read(pieceformat.WrittenFile)
	if err == nil {
		_, _, err = pieceformat.DecodeWritten(b)
	}
	c.judgeMeta(pieceformat.WrittenFile, info, err)
	return nil
}

// unused is a visitor that ignores the content of a checkpoint.
type unused struct{}

func (unused) Head(pieceformat.Checkpoint) error        { return nil }
func (unused) Owner(*pieceformat.CheckpointOwner) error { return nil }
func (unused) Entry(*pieceformat.CheckpointEntry) error { return nil }

func (c *check) takeText(d kv.Digest, b []byte) error {
	err := pieceformat.CheckText(d, b)
	if err == nil {
		c.kept.Lock()
		c.texts[d] = string(b)
		c.kept.Unlock()
	}
	return err
}

func (c *check) takePlan(d kv.Digest, b []byte) error {
	p, err := pieceformat.DecodePlan(d, b)
	if err == nil {
		c.kept.Lock()
		c.plans[d] = p
		c.kept.Unlock()
	}
	return err
}

// text returns the text of a namespace. An unknown namespace is looked up again, since it may have been opened after the check
// began: a host stores the text before the first piece. If the text exists but cannot be read, the piece is not an orphan.
func (c *check) text(d kv.Digest) (string, error) {
	c.kept.Lock()
	defer c.kept.Unlock()
	if text, ok := c.texts[d]; ok {
		return text, nil
	}
	switch b, err := c.disk.Text(d); {
	case b != nil:
		c.texts[d] = string(b)
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("%w: digest %s", errUnknownNamespace, d)
	default:
		return "", fmt.Errorf("fsck: the text of its namespace %s: %v", d, err) // an error that is no verdict on the piece
	}
	return c.texts[d], nil
}

// plan returns a layout plan. An unknown plan is looked up again, as in text.
func (c *check) plan(d kv.Digest) (*kv.Plan, error) {
	c.kept.Lock()
	defer c.kept.Unlock()
	if p := c.plans[d]; p != nil {
		return p, nil
	}
	switch p, _, err := c.disk.Plan(d); {
	case p != nil:
		c.plans[d] = p
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %s", pieceformat.ErrUnknownPlan, d)
	default:
		return nil, fmt.Errorf("fsck: its plan %s: %v", d, err)
	}
	return c.plans[d], nil
}

// each calls take for every file in dir that has a digest as its name.
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
		b, info, err := c.disk.Read(rel)
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

// judge checks the checksums of a file that is too large to be read into memory.
func (c *check) judge(rel string, how func(f io.ReaderAt, size int64) error) {
	var info staging.Info
	err := c.disk.Open(rel, func(f staging.File, is staging.Info) error {
		info = is
		return how(f, is.Size)
	})
	c.judgeMeta(rel, info, err)
}

// entries lists a directory. It returns nothing if the directory does not exist. If the name is not a directory it adds a
// problem.
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
