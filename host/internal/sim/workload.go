package sim

import (
	"context"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/trace"
)

// Workload is a trace prepared for simulation: chunks are numbered from 0 in order of first use.
type Workload struct {
	Name                string
	ids                 []uint32    // all requests end to end
	ends                []uint32    // of each request, in ids
	times               []uint64    // of each request, nanoseconds
	hints               []abi.Hints // of each request
	keys                []uint64    // of each chunk: its fingerprint
	parents             []uint32    // of each chunk: the chunk before it, or abi.None
	depths              []uint32
	firstChild, sibling []uint32 // of each chunk; abi.None at the end
	longest             int      // request, in chunks
	nextOnce            sync.Once
	nextUse             []uint32 // of each access: where its chunk is used next
}

// Requests is the number of requests.
func (w *Workload) Requests() int { return len(w.ends) }

// Accesses is the number of chunks that they use, counting each use.
func (w *Workload) Accesses() int { return len(w.ids) }

// Unique is the number of different chunks.
func (w *Workload) Unique() int { return len(w.keys) }

// maxAccesses keeps positions within u32.
const maxAccesses = math.MaxUint32 - 1

// Load reads a trace file.
func Load(ctx context.Context, path string) (*Workload, error) {
	r, err := trace.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return read(ctx, traceName(path), r.Next)
}

// traceName is a file's name without its extensions.
func traceName(path string) string {
	name := filepath.Base(path)
	for _, suffix := range []string{".zst", ".gz", ".jsonl"} {
		name = strings.TrimSuffix(name, suffix)
	}
	return name
}

func read(ctx context.Context, name string, next func(*trace.Request) error) (*Workload, error) {
	w := &Workload{Name: name}
	var numbers numbering
	var req trace.Request
	for {
		switch err := next(&req); {
		case err == io.EOF:
			if len(w.ids) == 0 {
				return nil, fmt.Errorf("%w: %s uses no chunk", ErrTrace, name)
			}
			w.linkChildren()
			return w, nil
		case err != nil:
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if len(w.ids)+len(req.HashIDs) > maxAccesses {
			return nil, fmt.Errorf("%w: %s has more than %d accesses", ErrTrace, name, maxAccesses)
		}
		parent := abi.None
		for depth, id := range req.HashIDs {
			n, known := numbers.of(id)
			if !known {
				w.keys = append(w.keys, fingerprint(id))
				w.parents = append(w.parents, parent)
				w.depths = append(w.depths, uint32(depth))
			}
			w.ids = append(w.ids, n)
			parent = n
		}
		w.longest = max(w.longest, len(req.HashIDs))
		w.ends = append(w.ends, uint32(len(w.ids)))
		w.times = append(w.times, uint64(max(0, req.Timestamp))*1e6)
		w.hints = append(w.hints, req.Hints())
	}
}

// linkChildren links every chunk's children, the youngest first.
func (w *Workload) linkChildren() {
	w.firstChild, w.sibling = make([]uint32, len(w.keys)), make([]uint32, len(w.keys))
	for i := range w.firstChild {
		w.firstChild[i], w.sibling[i] = abi.None, abi.None
	}
	for id, parent := range w.parents {
		if parent != abi.None {
			w.sibling[id] = w.firstChild[parent]
			w.firstChild[parent] = uint32(id)
		}
	}
}

// fingerprint stands for the host's hash of namespace, group and key (the finaliser of SplitMix64). It is never 0.
func fingerprint(id uint64) uint64 {
	z := id + 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return max(1, z^z>>31)
}

// HashID is the hash id in the trace that a fingerprint is of.
func HashID(key uint64) uint64 {
	z := (key ^ key>>31 ^ key>>62) * 0x319642b2d24d8ec3
	z = (z ^ z>>27 ^ z>>54) * 0x96de1b173f119089
	return (z ^ z>>30 ^ z>>60) - 0x9e3779b97f4a7c15
}

// numbering maps ids to dense numbers: small ids by a table, others by a map.
type numbering struct {
	small []uint32 // number + 1, 0 for none
	large map[uint64]uint32
	n     uint32
}

const smallIDs = 1 << 24

func (d *numbering) of(id uint64) (n uint32, known bool) {
	if id < smallIDs {
		if id >= uint64(len(d.small)) {
			d.small = append(d.small, make([]uint32, id+1-uint64(len(d.small)))...)
		}
		if n = d.small[id]; n == 0 {
			d.n++
			d.small[id] = d.n
			return d.n - 1, false
		}
		return n - 1, true
	}
	if n, known = d.large[id]; !known {
		if d.large == nil {
			d.large = make(map[uint64]uint32)
		}
		n = d.n
		d.n++
		d.large[id] = n
	}
	return n, known
}

// next is, for each access, the position where its chunk is used next, or never.
func (w *Workload) next() []uint32 {
	w.nextOnce.Do(func() {
		w.nextUse = make([]uint32, len(w.ids))
		later := make([]uint32, len(w.keys))
		for i := range later {
			later[i] = never
		}
		for i := len(w.ids) - 1; i >= 0; i-- {
			w.nextUse[i] = later[w.ids[i]]
			later[w.ids[i]] = uint32(i)
		}
	})
	return w.nextUse
}

const never = math.MaxUint32
