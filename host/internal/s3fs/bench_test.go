package s3fs

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// BenchmarkBesideTheLibrary stores and loads pieces, eight at a time, and does the same with the bare library.
func BenchmarkBesideTheLibrary(b *testing.B) {
	b.Setenv("AWS_ACCESS_KEY_ID", "key")
	b.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	f, err := Open(Config{Path: top, Endpoint: s3double.Start(b).URL, PathStyle: true,
		Target: func(temp string) (string, bool) { return temp[:len(temp)-4], true }})
	if err != nil {
		b.Fatal(err)
	}
	for _, size := range []int{64 << 10, 1 << 20, 4 << 20} {
		for _, c := range []struct {
			name string
			do   func(n int, buf []byte) error
		}{
			{"store/library", func(n int, buf []byte) error {
				_, err := f.core.PutObject(b.Context(), "bucket", fmt.Sprintf("plain/%d", n%64), bytes.NewReader(buf), int64(len(buf)), "", "",
					minio.PutObjectOptions{DisableContentSha256: true})
				return err
			}},
			{"store/file", func(n int, buf []byte) error {
				name := fmt.Sprintf("%s/%d", top, n%64)
				w, err := f.OpenFile(fmt.Sprintf("%s-%d.tmp", name, n), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
				if err != nil {
					return err
				}
				if _, err = w.WriteAt(buf, 0); err == nil {
					err = f.Rename(w.Name(), name)
				}
				_ = w.Close()
				return err
			}},
			{"store/copied", func(n int, buf []byte) error {
				b := f.memory.take(len(buf))
				copy(b, buf)
				_, err := f.core.PutObject(context.Background(), "bucket", fmt.Sprintf("plain/%d", n%64), bytes.NewReader(b), int64(len(buf)), "", "",
					minio.PutObjectOptions{DisableContentSha256: true})
				f.memory.give(b)
				return err
			}},
			{"load/library", func(n int, buf []byte) error {
				o, _, _, err := f.core.GetObject(b.Context(), "bucket", fmt.Sprintf("plain/%d", n%64), minio.GetObjectOptions{})
				if err != nil {
					return err
				}
				defer o.Close()
				_, err = io.ReadFull(o, buf)
				return err
			}},
			{"load/file", func(n int, buf []byte) error {
				r, err := f.OpenFile(fmt.Sprintf("%s/%d", top, n%64), os.O_RDONLY, 0)
				if err != nil {
					return err
				}
				defer r.Close()
				_, err = r.ReadAt(buf, 0)
				return err
			}},
		} {
			b.Run(fmt.Sprintf("%s/%d", c.name, size), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for n := range 64 { // what is loaded is there
					if err := c.do(n, make([]byte, size)); err != nil {
						b.Fatal(err)
					}
				}
				b.ResetTimer()
				var before, after unix.Rusage
				_ = unix.Getrusage(unix.RUSAGE_SELF, &before)
				var next atomic.Int64
				var all sync.WaitGroup
				for range 8 {
					all.Go(func() {
						buf := make([]byte, size)
						for n := next.Add(1); n <= int64(b.N); n = next.Add(1) {
							if err := c.do(int(n), buf); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				all.Wait()
				_ = unix.Getrusage(unix.RUSAGE_SELF, &after)
				cpu := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
				b.ReportMetric(float64(cpu)/float64(b.N), "cpu-ns/op") // of the server, too
			})
		}
	}
}
