package s3fs

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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

// BenchmarkLateAnswers loads pieces, eight at a time, from a server of which one read in a hundred is answered half a second late.
func BenchmarkLateAnswers(b *testing.B) {
	b.Setenv("AWS_ACCESS_KEY_ID", "key")
	b.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	proxy := s3double.StartProxy(b, s3double.StartReal(b))
	f, err := Open(Config{Path: top, Endpoint: proxy.URL, PathStyle: true})
	if err != nil {
		b.Fatal(err)
	}
	const objects = 64
	buf := make([]byte, 1<<20)
	for n := range uint64(objects) {
		if _, err := f.put(f.key(fmt.Sprintf("%s/%d", top, n)), n+1, buf, condition{}); err != nil {
			b.Fatal(err)
		}
	}
	for round := range 3 {
		for _, hedged := range []bool{false, true} {
			b.Run(fmt.Sprintf("%d/hedged=%t", round, hedged), func(b *testing.B) {
				f.hedge = hedge{}
				proxy.Set(s3double.Rule{Fault: s3double.Late, Method: "GET", Every: 100})
				before := f.Stats().Requests[Get]
				var mu sync.Mutex
				var took []time.Duration
				var all sync.WaitGroup
				for range 8 {
					all.Go(func() {
						buf := make([]byte, 1<<20)
						for range 500 {
							began := time.Now()
							if !hedged {
								f.hedge.mu.Lock()
								f.hedge.left = -1e9
								f.hedge.mu.Unlock()
							}
							r, err := f.OpenFile(fmt.Sprintf("%s/%d", top, rand.IntN(objects)), os.O_RDONLY, 0)
							if err == nil {
								_, err = r.ReadAt(buf, 0)
								_ = r.Close()
							}
							if err != nil {
								b.Error(err)
								return
							}
							mu.Lock()
							took = append(took, time.Since(began))
							mu.Unlock()
						}
					})
				}
				all.Wait()
				slices.Sort(took)
				for _, p := range []int{50, 95, 99} {
					b.ReportMetric(took[len(took)*p/100].Seconds()*1000, fmt.Sprintf("p%d-ms", p))
				}
				b.ReportMetric(float64(f.Stats().Requests[Get]-before)/float64(len(took)), "requests/load")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
