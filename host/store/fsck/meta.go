package fsck

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/zeebo/xxh3"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// maxMeta bounds a namespace's text and a plan.
const maxMeta = 4 << 20

// meta reads what the store keeps for itself: everything that it takes to judge pieces, and the list of touches.
func (c *check) meta() error {
	texts := func(d chunk.Digest, b []byte) error {
		if store.TextDigest(b) != d {
			return fmt.Errorf("%w: its digest is %s", store.ErrDamaged, store.TextDigest(b))
		}
		if err := c.names.namespace(d, string(b)); err != nil {
			return err
		}
		c.texts[d] = string(b)
		return nil
	}
	plans := func(d chunk.Digest, b []byte) error {
		p, err := chunk.DecodePlan(b)
		if err == nil && p.Digest() != d {
			err = fmt.Errorf("%w: its digest is %s", store.ErrDamaged, p.Digest())
		}
		if err != nil {
			return err
		}
		c.plans[d] = p
		return nil
	}
	if err := c.kept(store.NamespacesDir, texts); err != nil {
		return err
	}
	if err := c.kept(store.PlansDir, plans); err != nil {
		return err
	}
	c.touches()
	return nil
}

// kept goes through files that are named by the digest of what they hold.
func (c *check) kept(dir string, take func(d chunk.Digest, b []byte) error) error {
	list, err := c.o.FS.ReadDir(c.dir + "/" + dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("%w: %w", ErrRoot, err)
	}
	for _, e := range list {
		rel := dir + "/" + e.Name()
		if _, temp := store.TempOwner(e.Name()); temp {
			c.temporary(rel)
			continue
		}
		d, err := chunk.ParseDigest(e.Name())
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
	f, err := c.o.FS.OpenFile(c.dir+"/"+rel, os.O_RDONLY, 0)
	if err != nil {
		return nil, staging.Info{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, info, err
	}
	if info.Size > maxMeta {
		return nil, info, fmt.Errorf("%w: it has %d bytes", store.ErrDamaged, info.Size)
	}
	b := make([]byte, info.Size)
	n, err := f.ReadAt(b, 0)
	if err == io.EOF {
		err = nil
	}
	return b[:n], info, err
}

// touches checks the list of last touches: magic, time, count, checksum of the list, and the list.
func (c *check) touches() {
	const head = 32
	rel := store.TouchesFile
	f, err := c.o.FS.OpenFile(c.dir+"/"+rel, os.O_RDONLY, 0)
	if err != nil {
		c.judgeMeta(rel, staging.Info{}, err)
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil {
		err = func() error {
			var b [head]byte
			if n, err := f.ReadAt(b[:], 0); n < head {
				return errors.Join(store.ErrDamaged, err)
			}
			if count := binary.LittleEndian.Uint64(b[16:]); count > 1<<40 || info.Size != head+8*int64(count) {
				return fmt.Errorf("%w: %d bytes for %d touches", store.ErrDamaged, info.Size, count)
			}
			sum := xxh3.New()
			if _, err := io.Copy(sum, io.NewSectionReader(f, head, info.Size-head)); err != nil {
				return err
			}
			if sum.Sum64() != binary.LittleEndian.Uint64(b[24:]) {
				return fmt.Errorf("%w: the list of touches has another checksum", store.ErrDamaged)
			}
			return nil
		}()
	}
	c.judgeMeta(rel, info, err)
}
