package fsck

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

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

// members looks at what hosts that share the root leave for each other. Nothing of it is ever repaired: they are at
// work with it.
func (c *check) members() error {
	now := time.Now()
	for _, dir := range []string{"hosts", "gone"} {
		members, err := c.listed(shared.Dir + "/" + dir)
		if err != nil {
			return err
		}
		for _, member := range members {
			rel := path.Join(shared.Dir, dir, member)
			info, err := c.o.FS.Stat(c.dir + "/" + rel + "/status")
			if err == nil && now.Sub(info.ModTime) >= c.o.TempAge {
				c.found(Problem{
					Path: rel, Kind: Absent, What: "no heartbeat for " + now.Sub(info.ModTime).Round(time.Second).String(),
				})
			}
			c.control(rel + "/status")
		}
	}
	epochs, err := c.listed(shared.Dir)
	if err != nil {
		return err
	}
	for _, epoch := range epochs {
		if epoch[0] != 'e' && epoch[0] != 'x' {
			continue
		}
		c.control(path.Join(shared.Dir, epoch, "beat"))
		for _, dir := range []string{"grants", "journal"} {
			files, err := c.listed(path.Join(shared.Dir, epoch, dir))
			if err != nil {
				return err
			}
			for _, name := range files {
				c.control(path.Join(shared.Dir, epoch, dir, name))
			}
		}
	}
	return nil
}

// control judges a file that is replaced as a whole, and is gone at any time.
func (c *check) control(rel string) {
	if strings.HasSuffix(rel, ".new") {
		return // being written
	}
	b, info, err := c.small(rel)
	p := Problem{Path: rel, Bytes: info.Allocated}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err != nil:
		p.Kind, p.What = Unreadable, err.Error()
	default:
		if err = shared.JudgeControl(b); err == nil {
			return
		}
		p.Kind, p.What = Protocol, err.Error()
	}
	c.found(p)
}

// listed lists a directory that need not be there.
func (c *check) listed(rel string) (names []string, err error) {
	list, err := c.entries(rel)
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, err
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
