package devices

import (
	"fmt"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// longestTerm is the longest time for which a bucket's lock is valid without being renewed. A start after a kill may have to
// wait that long.
const longestTerm = 15 * time.Second

// openBuckets creates the file systems of the roots in buckets. It sends no request to a server.
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
			c.Term, c.Budget = min(longestTerm, limit/2), limit*2/5 // so that one operation is long enough to wait until a lock lapses
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
