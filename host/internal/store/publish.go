package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Publish makes the piece visible under its name. The entry becomes resident if this is its last missing piece. The steps are:
// make the bytes durable (Strict), rename without replacing, make the name durable (Strict), enter the piece in the index. If a
// step fails, the put is aborted.
func (p *Put) Publish(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == over {
		return ErrPutOver
	}
	err := ctx.Err()
	var info staging.Info
	if err == nil {
		info, err = p.finish()
	}
	if err == nil {
		info, err = p.link(info)
	}
	if err != nil {
		p.abort(err)
		return err
	}
	p.state = published
	return p.enter(info)
}

// finish checks that the temporary is complete, and closes it.
func (p *Put) finish() (staging.Info, error) {
	if p.state != filling {
		return staging.Info{}, fmt.Errorf("%w: nothing at all", ErrShort)
	}
	if p.strict() {
		if err := p.file.Datasync(); err != nil {
			return staging.Info{}, p.root.SyncFailed(err)
		}
	}
	info, err := p.file.Stat()
	if err == nil && (p.size == 0 || info.Size != p.size) {
		err = fmt.Errorf("%w: %d of %d bytes", ErrShort, info.Size, p.size)
	}
	return info, errors.Join(err, p.closeFile())
}

func (p *Put) closeFile() error {
	if p.file == nil {
		return nil
	}
	err := p.file.Close()
	p.file = nil
	return err
}

// link renames the temporary to its name. If the name is taken, link examines the file: it may be the same piece or a damaged
// file. If the place policy gave the same name to two keys, it may be another piece.
func (p *Put) link(info staging.Info) (_ staging.Info, failed error) {
	r := p.root
	var claimed []*files.Orphan
	defer func() { r.Orphans.Settle(claimed, failed == nil) }()
	for range maxObstacles {
		target := p.target
		claimed = append(claimed, r.Orphans.Claim(p.target)...)
		err := r.owner.publish(p, info)
		if err == nil {
			return info, p.syncName()
		}
		if files.Misled(err) && p.name != "" {
			if err = p.leaveName(fmt.Errorf("its name leads through a file: %w", err)); err != nil {
				return info, fmt.Errorf("store: publishing %s: %w", p.target, err)
			}
			r.Orphans.Settle(claimed, false)
			claimed = nil
			continue
		}
		if !errors.Is(err, fs.ErrExist) {
			return info, fmt.Errorf("store: publishing %s: %w", p.target, err)
		}
		h, there, herr := r.Look(p.target)
		switch {
		case errors.Is(herr, fs.ErrNotExist):
		case (there.IsDir() || errors.Is(herr, unix.EISDIR)) && p.name != "":
			if err := p.leaveName(fmt.Errorf("its name is a directory: %w", err)); err != nil {
				return info, fmt.Errorf("store: publishing %s: %w", p.target, err)
			}
		case herr != nil && !pieceformat.IsDamage(herr) && !errors.Is(herr, staging.ErrNotRegular):
			return info, fmt.Errorf("store: publishing %s, where something stands: %w", p.target, herr)
		case herr == nil && p.class.IsPiece(&h, &p.q.Key, p.q.Rank):
			if p.strict() {
				if err := r.SyncBytes(p.target); err != nil {
					return info, err
				}
			}
			p.release() // before the account releases a file that was left under this name
			return there, p.syncName()
		default:
			if err := r.owner.nameTaken(p, &h, herr); err != nil {
				return info, fmt.Errorf("store: publishing %s: %w", p.target, err)
			}
		}
		if p.target != target { // the object with the old name is still there
			r.Orphans.Settle(claimed, false)
			claimed = nil
		}
	}
	return info, fmt.Errorf("store: publishing %s: the name is taken again and again", p.target)
}

// enter enters the published piece in the index.
func (p *Put) enter(info staging.Info) error {
	r := p.root
	p.release()
	r.budget.Saved(p.class.FileBytes() - p.size)
	r.Lock()
	if e := r.Index.At(p.mark.Slot); e.Is(index.Evicting) || p.q.copy != nil && p.q.copy.entry.Gone() {
		forgotten := e.Is(index.Detached) // forgotten together with all others; a scan will find the file again
		r.Unlock()
		if !forgotten {
			_, _ = r.owner.unlink(&entries.Eviction{Class: p.class, Key: p.q.Key, Names: namesOf(p.q.Rank, p.name)}, 1<<p.q.Rank)
		}
		p.end()
		return fmt.Errorf("%w: the entry was dropped while its piece was written", ErrGone)
	}
	diff := pieceformat.Padded(info.Allocated) - p.class.FileBytes()
	wanted := r.Written(p.mark.Slot, p.q.Rank, p.name, p.q.Ranks, p.q.Parent, diff)
	r.Unlock()
	p.end()
	if !wanted {
		r.owner.withdraw(p)
	}
	if r.entered.Add(1) == speedReaders {
		close(r.some)
	}
	r.keep(p.mark, WriteThrough)
	r.shrink(context.Background())
	return nil
}

// Abort cancels the reservation and removes the file. It may be called more than once. After Publish it does nothing.
func (p *Put) Abort(cause error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.abort(cause)
}

func (p *Put) abort(cause error) {
	if p.state == over {
		return
	}
	filled := p.state == filling
	p.state = over
	_ = p.closeFile()
	r := p.root
	r.twice.Add(p.class.FileBytes())
	p.release()
	if !filled && p.charge.Bytes == p.class.FileBytes() {
		r.budget.Refund(&p.charge) // the charge of a whole entry may cover pieces of other ranks
	}
	if health.Judge(cause) == health.NoRoom {
		freeSpace{r}.full(p.entryBytes(), cause)
	}
	r.Lock()
	r.Count.Aborted++
	if r.cfg.Shared { // otherwise the entry keeps the bytes for a put that tries again
		r.Unreserve(p.mark.Slot, p.q.Rank, p.class.FileBytes())
	}
	r.Unlock()
	r.Log.Debug("put aborted", "key", p.q.Key, "rank", p.q.Rank, "cause", cause)
	p.end()
	r.twice.Add(-p.class.FileBytes())
	r.shrink(context.Background())
}

// end ends the write and the put's hold on its entry.
func (p *Put) end() {
	p.state = over
	p.root.Lock()
	p.root.EndWrite(p.mark, p.q.Rank)
	p.root.Unlock()
	p.unwatch()
}

func (p *Put) syncName() error {
	if !p.strict() {
		return nil
	}
	err := p.root.SyncName(filepath.Dir(p.target))
	if err != nil {
		p.root.owner.withdraw(p)
	}
	return err
}
