package s3fs

import (
	"context"
	"io"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
)

// Control gives access to the small objects by which hosts coordinate the use of a shared bucket. They are read and written as
// a whole, even if [FS.WriteWhile] forbids other writes. The time limits are short, because the caller has to keep up its
// heartbeat.
type Control struct {
	fs     *FS
	client *client
	prefix string
}

// Control returns access to the objects below a name. patience is the time limit of a request with all its attempts.
func (f *FS) Control(name string, patience time.Duration) *Control {
	return &Control{fs: f, client: f.apart(patience, max(patience/2, time.Millisecond)), prefix: f.key(name) + "/"}
}

// Get reads an object and returns its version. If the object still has the known version, Get returns no data.
// It reads at most the given number of bytes.
func (c *Control) Get(name, known string, most int64) (data []byte, version string, err error) {
	err = c.client.do(Get, 0, func(ctx context.Context) error {
		data, version = nil, known
		var o minio.GetObjectOptions
		if known != "" {
			if err := o.SetMatchETagExcept(known); err != nil {
				return err
			}
		}
		body, info, _, err := c.client.core.GetObject(ctx, c.client.bucket, c.prefix+name, o)
		if isCode(err, http.StatusNotModified) {
			return nil
		}
		if err != nil {
			return err
		}
		defer body.Close()
		data, err = io.ReadAll(io.LimitReader(body, most))
		c.client.read.Add(uint64(len(data)))
		version = info.ETag
		return err
	})
	return data, version, failed("read", c.prefix+name, err, false)
}

// Put replaces the version over of an object. If over is empty, there must be no object. The error is fs.ErrExist or
// fs.ErrNotExist if this does not hold. After any other error, the object may have been written.
func (c *Control) Put(name string, data []byte, over string) (version string, err error) {
	version, err = c.client.put(c.prefix+name, c.fs.newNumber(), data, condition{absent: over == "", etag: over})
	return version, failed("write", c.prefix+name, err, true)
}

// Remove removes an object. A missing object is not an error.
func (c *Control) Remove(name string) error {
	return failed("remove", c.prefix+name, c.client.remove(c.prefix+name), true)
}

// List returns the versions of the objects directly below a name. It also returns the names that have objects below them, with
// an empty version.
func (c *Control) List(name string) (versions map[string]string, err error) {
	versions = map[string]string{}
	err = c.client.list(context.Background(), c.prefix+name+"/", "/", func(o *minio.ObjectInfo, _ bool) {
		versions[path.Base(o.Key)] = strings.Trim(o.ETag, `"`)
	})
	return versions, failed("list", c.prefix+name, err, false)
}
