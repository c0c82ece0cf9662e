package s3fs

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/minio/minio-go/v7"
)

// Trial is the result of testing a bucket.
type Trial struct {
	Failed      []string      `json:"failed"` // failed requests, with the reason
	Conditional bool          `json:"conditional_writes"`
	Clock       time.Duration `json:"clock_ahead_ns"` // time by which the server's clock is ahead of this machine's
	FirstByte   time.Duration `json:"first_byte_ns"`  // time to the first byte of a read of 4 KiB
	Read, Write []int64       // bytes per second of one request, for each of TrialSizes
}

// TrialSizes are the sizes for which a trial measures the speed.
var TrialSizes = [...]int{1 << 20, 8 << 20}

// Try makes a request of each kind with an object of its own, and removes the object. It takes no lock.
func (f *FS) Try() *Trial {
	t := &Trial{}
	key := fmt.Sprintf("%s.kvhost/check-%d", f.prefix, os.Getpid())
	try := func(what string, err error) bool {
		if err != nil {
			t.Failed = append(t.Failed, fmt.Sprintf("%s: %v", what, err))
		}
		return err == nil
	}
	try("list objects", f.list(context.Background(), f.prefix+".kvhost/", "/", func(*minio.ObjectInfo, bool) {}))
	if f.outage.Load() != nil {
		return t
	}
	id := f.newNumber()
	page := make([]byte, 4096)
	etag, err := f.put(key, id, page, condition{})
	if !try("put an object", err) {
		return t
	}
	_, absent := f.put(key, id, page, condition{absent: true})
	_, other := f.put(key, id, page, condition{etag: "00000000000000000000000000000000"})
	_, right := f.put(key, id, page, condition{etag: etag})
	t.Conditional = isCode(absent, http.StatusPreconditionFailed) && isCode(other, http.StatusPreconditionFailed) && right == nil
	if !try("get a part of an object", f.tryRange(key)) {
		try("remove an object", f.remove(key))
		return t
	}
	began := time.Now()
	_, _, err = f.get(key, "", page, 0)
	t.FirstByte = time.Since(began)
	try("get an object", err)
	_, err = f.head(key)
	try("look at an object", err)
	try("copy an object", f.copy(key, "", key+"-copy"))
	t.Clock = f.clock(key)
	for _, size := range TrialSizes {
		data := make([]byte, size)
		began = time.Now()
		_, err = f.put(key, id, data, condition{})
		if !try(fmt.Sprintf("put %d bytes", size), err) {
			break
		}
		put := time.Since(began)
		began = time.Now()
		_, _, err = f.get(key, "", data, 0)
		try(fmt.Sprintf("get %d bytes", size), err)
		t.Write = append(t.Write, int64(float64(size)/put.Seconds()))
		t.Read = append(t.Read, int64(float64(size)/time.Since(began).Seconds()))
	}
	upload, err := f.start(key, id)
	if try("begin a multipart upload", err) {
		try("list multipart uploads", f.uploads(key, func(string, string) {}))
		try("end a multipart upload", f.abort(key, upload))
	}
	try("remove an object", f.remove(key+"-copy"))
	try("remove an object", f.remove(key))
	return t
}

// tryRange reads a part of an object. A server that ignores Range would answer with the whole object.
func (f *FS) tryRange(key string) (wrong error) {
	err := f.free.do(Get, 8, func(ctx context.Context) error {
		s, _, err := f.free.begin(ctx, key, "", 8, 8)
		if err == nil {
			s.close()
		} else if errors.Is(err, ErrAnswer) { // a repetition would get the same answer
			wrong, err = err, nil
		}
		return err
	})
	return errors.Join(wrong, err)
}

// clock returns the time by which the server's clock is ahead, from the date of an answer. Dates have whole seconds.
func (f *FS) clock(key string) (ahead time.Duration) {
	_ = f.do(Get, 0, func(ctx context.Context) error {
		body, _, header, err := f.core.GetObject(ctx, f.bucket, key, minio.GetObjectOptions{})
		if err != nil {
			return err
		}
		defer body.Close()
		if date, err := http.ParseTime(header.Get("Date")); err == nil {
			ahead = (time.Until(date) + time.Second/2).Round(time.Second)
		}
		return nil
	})
	return ahead
}
