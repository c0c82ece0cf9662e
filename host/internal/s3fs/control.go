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

// Control is the small objects below a name by which hosts tell each other how a bucket is shared. They are read and written
// whole, whatever [FS.WriteWhile] says, and with little patience: who asks has a heartbeat to keep up.
type Control struct {
	fs     *FS
	client *client
	prefix string
}

// mostControl bounds an object that is read whole.
const mostControl = 64 << 20

// Control gives access to the objects below a name. A request may take so long with all its attempts.
func (f *FS) Control(name string, patience time.Duration) *Control {
	return &Control{fs: f, client: f.apart(patience, max(patience/2, time.Millisecond)), prefix: f.key(name) + "/"}
}

// Get reads an object, and says which version it is. Where that is the one that is known, it reads nothing.
func (c *Control) Get(name, known string) (data []byte, version string, err error) {
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
		data, err = io.ReadAll(io.LimitReader(body, mostControl))
		c.client.read.Add(uint64(len(data)))
		version = info.ETag
		return err
	})
	return data, version, failed("read", c.prefix+name, err, false)
}

// Put writes an object in the place of a version, or where there is none if that is empty: else the error is fs.ErrExist or
// fs.ErrNotExist. After another error it may have been written.
func (c *Control) Put(name string, data []byte, over string) (version string, err error) {
	version, err = c.client.put(c.prefix+name, c.fs.newNumber(), data, condition{absent: over == "", etag: over})
	return version, failed("write", c.prefix+name, err, true)
}

// Remove removes an object, if it is there.
func (c *Control) Remove(name string) error {
	return failed("remove", c.prefix+name, c.client.remove(c.prefix+name), true)
}

// List tells the versions of the objects directly below a name, and the names with objects below them, without a version.
func (c *Control) List(name string) (versions map[string]string, err error) {
	versions = map[string]string{}
	err = c.client.list(context.Background(), c.prefix+name+"/", "/", func(o *minio.ObjectInfo, _ bool) {
		versions[path.Base(o.Key)] = strings.Trim(o.ETag, `"`)
	})
	return versions, failed("list", c.prefix+name, err, false)
}
