package devices

import (
	"fmt"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// longestTerm is how long a bucket's lock is held without being renewed, and what a start after a kill may wait for.
const longestTerm = 15 * time.Second

// openBuckets makes the file systems of the roots in buckets. No server is asked.
func (d *Devices) openBuckets() error {
	d.bucket = map[int]*s3fs.FS{}
	for i, r := range d.cfg.Roots {
		if r.Kind() != config.Bucket {
			continue
		}
		c := r.Bucket()
		c.Target, c.Log, c.Term = pieceformat.Target, d.log.With("root", r.Path), longestTerm
		c.Holder, _ = os.Hostname()
		if limit := d.cfg.Store.IOTimeout; limit > 0 {
			c.Term, c.Budget = min(longestTerm, limit/2), limit*2/5 // who waits for a lock to lapse does so in one operation
		}
		fsys, err := s3fs.Open(c)
		if err != nil {
			return fmt.Errorf("root %s: %w", r.Path, err)
		}
		d.bucket[i] = fsys
	}
	return nil
}

// Buckets returns the file systems of roots in buckets, by path.
func (d *Devices) Buckets() map[string]*s3fs.FS {
	out := map[string]*s3fs.FS{}
	for i, fsys := range d.bucket {
		out[d.cfg.Roots[i].Path] = fsys
	}
	return out
}
