package store

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// slowDisk is a file system that writes so many bytes per second, and nothing once it has lost its host.
type slowDisk struct {
	staging.FS
	rate float64
	lost *atomic.Bool
	mu   *sync.Mutex
	free *time.Time // when the last write ends
}

func (d slowDisk) OpenFile(name string, flag int, perm os.FileMode) (staging.File, error) {
	f, err := d.FS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return slowFile{f, d}, nil
}

func (d slowDisk) RenameNoReplace(from, to string) error {
	if d.lost.Load() {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: unix.ENODEV}
	}
	return d.FS.RenameNoReplace(from, to)
}

type slowFile struct {
	staging.File
	disk slowDisk
}

func (f slowFile) WriteAt(b []byte, off int64) (int, error) {
	if f.disk.lost.Load() {
		return 0, unix.ENODEV
	}
	f.disk.mu.Lock()
	at := time.Now()
	if f.disk.free.After(at) {
		at = *f.disk.free
	}
	*f.disk.free = at.Add(time.Duration(float64(len(b)) / f.disk.rate * 1e9))
	end := *f.disk.free
	f.disk.mu.Unlock()
	time.Sleep(time.Until(end))
	return f.File.WriteAt(b, off)
}

// lifeTrace is a trace's requests: when they come, and their chunks.
type lifeTrace []struct {
	Timestamp float64  `json:"timestamp"`
	Chunks    []uint64 `json:"hash_ids"`
}

func readTrace(b *testing.B, n int) (list lifeTrace) {
	f, err := os.Open("../../../examples/traces/mixed.jsonl.zst")
	must(b, err)
	defer f.Close()
	z, err := zstd.NewReader(f)
	must(b, err)
	defer z.Close()
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<20)
	for len(list) < n && lines.Scan() {
		list = append(list, lifeTrace{{}}...)
		must(b, json.Unmarshal(lines.Bytes(), &list[len(list)-1]))
	}
	must(b, lines.Err())
	return list
}

// possible is how many of a life's hits a disk could have had that holds so many chunks of the life before: a chunk is used at least as
// often as what continues it.
func (before lifeTrace) possible(after lifeTrace, chunks int) (hits int) {
	uses := map[uint64]int{}
	for _, r := range before {
		for _, c := range r.Chunks {
			uses[c] = 0
		}
	}
	for _, r := range after {
		for _, c := range r.Chunks {
			if _, there := uses[c]; !there {
				break
			}
			uses[c]++
		}
	}
	var all []int
	for _, n := range uses {
		all = append(all, n)
	}
	slices.SortFunc(all, func(a, b int) int { return cmp.Compare(b, a) })
	for _, n := range all[:min(chunks, len(all))] {
		hits += n
	}
	return hits
}

// BenchmarkNextLife is the table of operate.md: what share of the hits of a host's next life there is that its disk could have had, after
// kill -9 and after SIGTERM. All is a twentieth of its time: a memory level of 24 GiB for chunks of 64 MiB, in front of disks of 0.5, 1.7
// and 7 GB/s, 400 requests of a trace at three times their rate (1.2 GB/s of new chunks, five times the level), then 200 more.
func BenchmarkNextLife(b *testing.B) {
	const (
		faster = 20.
		speed  = 3 * faster
		chunk  = 64 << 20
		near   = 24 << 30 / chunk
		life   = 400
	)
	trace := readTrace(b, life+200)
	before, after := trace[:life], trace[life:]
	for _, disk := range []float64{0.5, 1.7, 7} {
		for _, mode := range []Write{WriteBack, WriteHits, WriteThrough} {
			for _, end := range []string{"kill", "SIGTERM"} {
				b.Run(fmt.Sprintf("disk=%v/write=%s/end=%s", disk, [...]string{"back", "hits", "through"}[mode], end), func(b *testing.B) {
					perSecond := func(bytes float64) float64 { return bytes * faster / chunk * pieceBytes }
					slow := slowDisk{rate: perSecond(disk * 1e9), lost: &atomic.Bool{}, mu: &sync.Mutex{}, free: &time.Time{}}
					shutdown := time.Duration(10e9 / faster)
					f := newFixtureIn(b, filepath.Join(b.TempDir(), "near"), near, 1, func(c *Config) {
						far := filepath.Join(b.TempDir(), "far")
						slow.FS = staging.Below(far)
						c.Roots[0].Volatile, c.Roots[0].Write, c.Now = true, mode, time.Now
						c.Roots = append(c.Roots, RootConfig{Path: far, Medium: Medium{FS: slow}, Capacity: 1 << 16 * pieceBytes, MaxEntries: 1 << 16, Level: 1})
						c.Moves.Bandwidth, c.Moves.Shutdown = int64(perSecond(2<<30)), shutdown
						c.Moves.Waiting = time.Duration(60e9 / faster)
						if end == "kill" {
							c.Moves.Shutdown = 0
						}
					})
					began := time.Now()
					for i, r := range before {
						time.Sleep(time.Until(began.Add(time.Duration(r.Timestamp / speed * 1e6))))
						l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(r.Chunks...), Request: uint32(i + 1)})
						must(b, err)
						for n := range l.Hits() {
							if _, err := read(l, n, 0); err != nil {
								b.Fatal(err)
							}
						}
						for n := l.Hits(); n < len(r.Chunks); n++ {
							q := PutRequest{Namespace: f.space, Key: testKey(r.Chunks[n]), Depth: uint32(n), Request: uint32(i + 1)}
							if n > 0 {
								q.Parent = testKey(r.Chunks[n-1])
							}
							_ = f.putAs(q) // it may be there behind a gap
						}
						l.Release()
					}
					seconds := time.Since(began).Seconds()
					if slow.lost.Store(end == "kill"); end != "kill" {
						seconds += shutdown.Seconds()
					}
					must(b, f.store.Close())
					slow.lost.Store(false)
					must(b, os.RemoveAll(f.cfg.Roots[0].Path))
					f.cfg.Moves.Shutdown = 0
					f.start()
					hits := 0
					for i, r := range after {
						l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(r.Chunks...), Pin: false, Request: uint32(i + 1)})
						must(b, err)
						hits += l.Hits()
						l.Release()
					}
					b.ReportMetric(float64(hits)/float64(before.possible(after, int(seconds*slow.rate/pieceBytes))), "of_possible")
					b.ReportMetric(float64(hits)/float64(before.possible(after, 1<<30)), "of_all")
				})
			}
		}
	}
}
