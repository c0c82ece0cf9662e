package host_test

import (
	"encoding/binary"
	"io/fs"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/config"
)

// compressionLog keeps the lines that tell of the choice.
type compressionLog struct {
	mu    sync.Mutex
	lines []string
}

func (l *compressionLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if strings.Contains(string(line), "compression chosen") {
		l.lines = append(l.lines, string(line))
	}
	return len(line), nil
}

// take returns the lines since the last call.
func (l *compressionLog) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer func() { l.lines = nil }()
	return strings.Join(l.lines, "")
}

// pieceVersions counts the files of pieces below a root by the version that their headers have.
func pieceVersions(t *testing.T, dir string) map[uint32]int {
	t.Helper()
	count := map[uint32]int{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".kv") {
			return err
		}
		head, err := os.ReadFile(path)
		if err == nil {
			count[binary.LittleEndian.Uint32(head[8:])]++
		}
		return err
	})
	testenv.OK(t, err)
	return count
}

// A host with compression = "auto" compresses while the speeds of the root and of the codec say that this saves time. What
// it has chosen is in the log, in the metrics and in the status; chunks of both kinds lie beside each other, and every byte of
// them comes back, also while the choice changes during stores, and after a restart.
func TestCompressionIsChosen(t *testing.T) {
	testenv.Slow(t)
	c := configuration(t)
	root := c.Roots[0].Path
	c.Store.Compression = config.CompressionAuto
	testenv.OK(t, c.Validate())
	slow := codec.Speeds{Write: 2e8, Read: 2e8, Encode: 1e9, Decode: 1e9}
	fast := codec.Speeds{Write: 4e9, Read: 4e9, Encode: 1e9, Decode: 1e9}
	var now atomic.Pointer[codec.Speeds]
	now.Store(&codec.Speeds{})
	var turns atomic.Uint64 // 0: the speeds stay as they are
	speeds := func() codec.Speeds {
		if turns.Load() > 0 {
			now.Store([]*codec.Speeds{&slow, &fast, &slow}[turns.Add(1)%3])
		}
		return *now.Load()
	}
	var log compressionLog
	random := rand.New(rand.NewPCG(5, 6))
	cfg := host.Config{Config: c, Version: "test", Log: slog.New(slog.NewTextHandler(&log, nil)), Speeds: speeds}
	h, two, stop := twoRanks(t, cfg)
	const pages, least = `kvhost_codec_page_bytes_total{direction="store",model="m"}`, "kvhost_root_compression_least_ratio"
	stored := 0
	store := func() {
		for _, r := range two {
			r.store(stored, random)
		}
		stored++
	}
	loadAll := func() {
		for n := range stored {
			for rank, r := range two {
				if !r.load(n, (n+rank)%2 == 0, random) {
					t.Errorf("chunk %d is gone", n)
				}
			}
		}
	}

	const each = 5
	compressed := 0 // files
	for _, phase := range []struct {
		speeds     codec.Speeds
		compresses bool
		logged     string // empty: nothing
		says       string // by the status
	}{
		{slow, true, "compressed=true", "a worker writes 0.20 and reads 0.20 GB/s, and the codec's are 1.00 and 1.00 GB/s: it saves time"},
		{fast, false, "compressed=false", "a worker writes 4.00 and reads 4.00 GB/s"},
		{fast, false, "", "the codec takes longer than it saves"},
		{slow, true, "compressed=true", "it saves time from a ratio of 1."},
	} {
		now.Store(&phase.speeds)
		before := metric(t, h, pages)
		for range each {
			store()
		}
		loadAll()
		want := 0.0
		if phase.compresses {
			want = each * chunkBytes
			compressed += each * ranks
		}
		if got := metric(t, h, pages) - before; got != want {
			t.Errorf("%+v: %.0f bytes of pages were compressed, want %.0f", phase.speeds, got, want)
		}
		if got := metric(t, h, least+`{root="`+root+`"}`); math.IsInf(got, 1) == phase.compresses {
			t.Errorf("%+v: compressed from a ratio of %g on", phase.speeds, got)
		}
		if text := log.take(); strings.Count(text, "\n") != min(1, len(phase.logged)) || !strings.Contains(text, phase.logged) {
			t.Errorf("%+v: the log says %q, want %q once", phase.speeds, text, phase.logged)
		}
		if got := h.Status().Roots[0].Compression; !strings.Contains(got, phase.says) {
			t.Errorf("%+v: the status says %q, want %q", phase.speeds, got, phase.says)
		}
		if got := pieceVersions(t, root); got[2] != compressed || got[1]+got[2] != stored*ranks {
			t.Errorf("%+v: files by version: %v; want %d of version 2 and %d in all", phase.speeds, got, compressed, stored*ranks)
		}
	}

	turns.Store(1) // from here on the choice changes at any time, also between the pieces of a chunk
	for range 10 {
		store()
		for rank, r := range two {
			if n := random.IntN(stored); !r.load(n, rank == 0, random) {
				t.Errorf("chunk %d is gone", n)
			}
		}
	}
	loadAll()
	if damaged := metric(t, h, `kvhost_root_damaged_total{root="`+root+`"}`); damaged != 0 {
		t.Errorf("%.0f files were damaged", damaged)
	}
	stop()

	_, two, stop = twoRanks(t, cfg)
	defer stop()
	loadAll()
	if got := pieceVersions(t, root); got[1] == 0 || got[2] == 0 || got[1]+got[2] != stored*ranks {
		t.Errorf("files by version after a restart: %v", got)
	}
}
