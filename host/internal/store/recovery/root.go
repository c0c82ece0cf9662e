package recovery

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Config makes a Root.
type Config struct {
	Entries  *entries.Set
	Kept     *Directory
	Judge    Judge
	Workers  int   // that read files in a scan
	Capacity int64 // of the root
	Sync     bool  // what a scan finds is made durable before it counts
	Now      func() time.Time
	// OwnsTemp says whether a temporary of an earlier run is this host's to remove.
	OwnsTemp func(host string) bool
	// Drop removes an entry that is not what the index says. It takes the lock.
	Drop func(m entries.Mark)
}

// Root is one root at a start and at an end: scans, checkpoint, list of touches.
type Root struct {
	Config
	Count Counters
	// Incomplete is set when a scan could not read something.
	Incomplete atomic.Bool

	current atomic.Pointer[Scan] // the first scan while it is under way, or nil
}

// Counters count since the store was opened.
type Counters struct {
	Scanned   atomic.Uint64 // files that scans have seen
	Swept     atomic.Uint64 // temporaries removed
	Foreign   atomic.Uint64 // files that are not the store's
	Unclaimed atomic.Uint64 // sound pieces that are of no namespace that is known, or under a name that none can have
}

// Seeks says whether a scan is under way that may yet come to the file of a piece.
func (r *Root) Seeks() bool { return r.current.Load() != nil && r.Kept.Health.Serves() }

// Seek enters the file of a piece that the scan under way has not come to, if it stands under one of these names.
func (r *Root) Seek(cl *catalog.Class, key *kv.Key, rank uint32, names ...string) {
	c, d := r.current.Load(), r.Kept
	if c == nil || !d.Health.Serves() {
		return
	}
	for _, rel := range names {
		if rel == "" {
			continue
		}
		name := d.Slash + rel
		if d.Orphans.Has(name) {
			continue
		}
		if h, info, err := d.Look(name); err == nil && cl.IsPiece(&h, key, rank) {
			c.identify(name, rel, &h, pieceformat.Padded(info.Allocated))
			return
		}
	}
}

// SweepTemps removes temporaries that an earlier run left among the store's own files.
func (r *Root) SweepTemps() {
	d := r.Kept
	for _, dir := range [...]string{
		pieceformat.MetaDir, pieceformat.NamespacesDir, pieceformat.PlansDir,
		pieceformat.Copies(pieceformat.NamespacesDir)[1], pieceformat.Copies(pieceformat.PlansDir)[1],
	} {
		list, err := d.FS.ReadDir(d.Slash + dir)
		if err != nil {
			d.Log.Warn("a directory could not be read; temporaries in it are left", "directory", dir, "error", err)
		}
		for _, e := range list {
			if temp, ok := pieceformat.ParseTemp(e.Name()); ok && r.OwnsTemp(temp.Host) {
				if err := r.sweep(d.Slash + dir + "/" + e.Name()); err != nil {
					d.Log.Warn("a temporary is left", "directory", dir, "file", e.Name(), "error", err)
				}
			}
		}
	}
}

func (r *Root) sweep(name string) error {
	if err := r.Kept.FS.Remove(name); err != nil {
		return err
	}
	r.Count.Swept.Add(1)
	return nil
}

// scanReport is how often the log hears of a scan.
const scanReport = 5 * time.Second

// Report tells the log how far a scan has come, until end is called.
func (r *Root) Report(ctx context.Context) (end func()) {
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(scanReport)
		defer tick.Stop()
		for start := r.Now(); ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				r.Entries.Lock()
				entries := r.Entries.Index.Len()
				r.Entries.Unlock()
				r.Kept.Log.Info("the scan goes on", "files", r.Count.Scanned.Load(), "entries", entries,
					"for", r.Now().Sub(start).Round(time.Second))
			}
		}
	}()
	return func() {
		stop()
		<-ended
	}
}
