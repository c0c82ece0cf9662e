package fsck

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// takeOut moves a bad file into quarantine, or removes it if hosts share the root. It does nothing unless this is a repair and
// the file is still the one that was checked.
func (c *check) takeOut(p *Problem, judged staging.Info) {
	if !c.o.Repair {
		return
	}
	name := c.dir + "/" + p.Path
	now, err := c.o.FS.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		p.Done = "gone by itself"
		return
	case err != nil:
		p.Failed = err.Error()
		return
	case !unchanged(now, judged):
		p.Done = "replaced by its host meanwhile"
		return
	}
	away := c.dir + "/" + pieceformat.RepairName(time.Now(), filepath.Base(p.Path))
	if err := c.o.FS.MkdirAll(filepath.Dir(away), 0o700); err != nil {
		p.Failed = err.Error()
		return
	}
	if p.Path == pieceformat.CheckpointFile {
		if err := c.o.FS.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			p.Failed = err.Error()
			return
		}
		p.Done = "removed: the next start scans the root"
		return
	}
	// The checkpoint lists this file, so the next start must not use it.
	if err := c.o.FS.Remove(c.dir + "/" + pieceformat.CheckpointFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.Failed = err.Error()
		return
	}
	if err := c.o.FS.RenameNoReplace(name, away); err != nil {
		p.Failed = err.Error()
		return
	}
	if c.shared() { // Hosts that share the root do not count the quarantine.
		if err := c.o.FS.Remove(away); err != nil && !errors.Is(err, fs.ErrNotExist) {
			p.Failed = err.Error()
			return
		}
		p.Done = "removed"
		return
	}
	if now, err := c.o.FS.Stat(away); !c.o.Alone && err == nil && !unchanged(now, judged) {
		// A host replaced the file between the check and the rename. The host now misses the new file. It counts the file in
		// quarantine, but would not count it if it were renamed back.
		p.Done = "replaced by its host meanwhile, and moved to " + strings.TrimPrefix(away, c.dir+"/")
		return
	}
	p.Done = "moved to " + strings.TrimPrefix(away, c.dir+"/")
}

// temporary is a temporary that the walk found.
type temporary struct {
	rel, owner string
	info       staging.Info
}

func (c *check) temporary(rel string) {
	temp, _ := pieceformat.ParseTemp(filepath.Base(rel))
	info, err := c.o.FS.Stat(c.dir + "/" + rel)
	if err != nil {
		return // published or removed since
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Temporaries.add(info.Allocated)
	c.temps = append(c.temps, temporary{rel, temp.Host, info})
}

// sweep checks the temporaries. A repair removes those of hosts that do not run.
func (c *check) sweep() {
	if len(c.temps) == 0 {
		return
	}
	now := c.fileTime()
	old := func(t temporary) bool { return now.Sub(t.info.ModTime) >= c.o.TempAge }
	if !c.o.Repair {
		for _, t := range c.temps {
			if old(t) {
				c.found(t.problem(fmt.Sprintf("of host %s, not written to for %s", t.owner,
					now.Sub(t.info.ModTime).Round(time.Second))))
			}
		}
		return
	}
	locks, err := c.lock()
	if err != nil {
		return
	}
	defer health.Unlock(locks)
	shared := c.shared()
	for owner, list := range c.byOwner() {
		var held io.Closer
		name := c.lockFile() + "." + owner
		if _, err := c.o.FS.Stat(name); err == nil {
			if held, err = c.o.FS.Lock(name); err != nil {
				c.report.InUse = true
				continue
			}
		}
		for _, t := range list {
			if shared && !old(t) {
				continue // A lock may not be visible on the owner's machine.
			}
			p := t.problem("of host " + owner + ", which does not run")
			if err := c.o.FS.Remove(c.dir + "/" + t.rel); err != nil && !errors.Is(err, fs.ErrNotExist) {
				p.Failed = err.Error()
			} else {
				p.Done = "removed"
			}
			c.found(p)
		}
		if held != nil {
			held.Close()
		}
	}
}

func (t *temporary) problem(what string) Problem {
	return Problem{Path: t.rel, Kind: Stale, What: what, Bytes: t.info.Allocated}
}

func (c *check) byOwner() map[string][]temporary {
	m := map[string][]temporary{}
	for _, t := range c.temps {
		m[t.owner] = append(m[t.owner], t)
	}
	return m
}

// shared reports whether hosts share the root or once did: each leaves its own lock file.
func (c *check) shared() bool {
	list, err := c.o.FS.ReadDir(c.dir + "/" + filepath.Dir(pieceformat.LockFile))
	return err != nil || slices.ContainsFunc(list, func(e fs.DirEntry) bool { // after an error it is unknown
		return strings.HasPrefix(e.Name(), filepath.Base(pieceformat.LockFile)+".")
	})
}

// fileTime returns the time of the file system's clock, which sets the modification times. It returns the time of this machine
// if it cannot or must not create a file.
func (c *check) fileTime() time.Time {
	now := time.Now()
	if !c.o.Repair {
		return now // a check writes nothing
	}
	name := fmt.Sprintf("%s/%s/.fsck-%d", c.dir, pieceformat.MetaDir, os.Getpid())
	f, err := c.o.FS.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return now
	}
	defer c.o.FS.Remove(name)
	defer f.Close()
	if _, err := f.WriteAt([]byte("\n"), 0); err != nil {
		return now
	}
	if info, err := f.Stat(); err == nil {
		return info.ModTime
	}
	return now
}

// quarantine counts the files in quarantine.
func (c *check) quarantine() error {
	list, err := c.entries(pieceformat.QuarantineDir)
	if err != nil {
		return err
	}
	for _, e := range list {
		if info, err := c.o.FS.Stat(c.dir + "/" + pieceformat.QuarantineDir + "/" + e.Name()); err == nil &&
			info.Mode.IsRegular() {
			c.report.Quarantine.add(info.Allocated)
		}
	}
	return nil
}
