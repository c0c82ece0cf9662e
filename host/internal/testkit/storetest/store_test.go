package storetest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"

	"github.com/kvhost/kvhost/host/internal/testkit/fusefs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// Store is what a history needs of one host's store. Its errors are those of package store.
type Store interface {
	// Use opens a namespace, as a session does. What else is asked of it does so first; until then the store has what it finds of it.
	Use(ctx context.Context, space int) error
	// Begin reserves room for a piece.
	Begin(ctx context.Context, of Piece) (Put, error)
	// Lookup asks for keys of one namespace, by their numbers; ranks are the pieces that a hit has, 0 for all.
	Lookup(space int, keys []uint64, ranks uint64) (Lease, error)
	// Has says whether all pieces of an entry are there, which is no hit.
	Has(Entry) (bool, error)
	// Discard removes keys of one namespace, by their numbers.
	Discard(space int, keys []uint64) ([]store.DiscardResult, error)
	// EndRequest ends the request that all puts belong to.
	EndRequest()
	Swap(ctx context.Context, s store.Swap) error
	// Settle waits until nothing moves between levels.
	Settle(ctx context.Context) error
	Maintain(ctx context.Context, root int, task store.Task) error
	Inspect(visit func([]store.Inspection)) error
	Stats() store.Stats
	Close() error
}

// Put is a piece that is being stored.
type Put interface {
	// Write writes a payload that content makes for its size.
	Write(content func(size int64) []byte) error
	Publish(ctx context.Context) error
	Abort(cause error)
	// Temp is the name of the temporary, or empty when there is none.
	Temp() string
}

// Lease is a pin on what a lookup found.
type Lease interface {
	Hits() int
	// Load reads and verifies a piece of the i-th hit. A piece that is not what it should be it reports to the store.
	Load(i int, rank uint32) ([]byte, error)
	Release()
}

// Opener opens a host's store. slots are for the bytes of pieces.
type Opener func(ctx context.Context, cfg store.Config, slots *staging.Slots) (Store, error)

const (
	numRanks = 2
	// pieceBytes is the size of a piece's file: header, table, and 20,000 bytes of payload.
	pieceBytes = 7 * pieceformat.Page
)

// namespaces are those of a history: they differ in their revision. Chunks are small, and large enough to be compressed:
// 2 blocks, 2 layers, K and V, pages of 2,500 bytes.
var namespaces = func() (list [2]kv.Namespace) {
	for i := range list {
		list[i] = kv.Namespace{
			Model: "test/model", Revision: fmt.Sprint(i), DType: "bf16", Engine: "test",
			HashAlgorithm: "sha256", KeyBytes: 32, TokensPerBlock: 16, TensorParallel: numRanks,
			Groups: []kv.Group{{Lookup: kv.ByPrefix, Geometry: kv.Uniform(2, 2, 2, 2500)}},
		}
	}
	return list
}()

// keyOf is the n-th key: spread like a hash, the same in every run.
func keyOf(n uint64) (k kv.Key) {
	r := rand.New(rand.NewPCG(n, 7))
	for i := 0; i < len(k); i += 8 {
		binary.LittleEndian.PutUint64(k[i:], r.Uint64())
	}
	return k
}

// hostStore is the [Store] that package store has.
type hostStore struct {
	*store.Store
	slots *staging.Slots

	mu     sync.Mutex
	spaces [len(namespaces)]*catalog.Namespace // that are in use
}

// OpenStore is the [Opener] of package store.
func OpenStore(ctx context.Context, cfg store.Config, slots *staging.Slots) (Store, error) {
	s, err := store.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &hostStore{Store: s, slots: slots}, nil
}

func (h *hostStore) Use(ctx context.Context, space int) error {
	_, err := h.space(ctx, space)
	return err
}

func (h *hostStore) space(ctx context.Context, i int) (_ *catalog.Namespace, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.spaces[i] == nil {
		h.spaces[i], err = h.Namespace(ctx, &namespaces[i])
	}
	return h.spaces[i], err
}

func (h *hostStore) EndRequest() { h.Store.EndRequest(1, abi.Hints{}) }

func (h *hostStore) Swap(ctx context.Context, s store.Swap) error {
	_, err := h.Store.Swap(ctx, s)
	return err
}

func (h *hostStore) Begin(ctx context.Context, of Piece) (Put, error) {
	ns, err := h.space(ctx, of.Space)
	if err != nil {
		return nil, err
	}
	q := store.PutRequest{
		Namespace: ns, Key: keyOf(of.Key), Depth: uint32(of.Key), Rank: of.Rank, Request: 1,
	}
	if of.Key != 0 {
		q.Parent = keyOf(of.Key - 1)
	}
	p, err := h.Store.Put(ctx, q)
	if err != nil {
		return nil, err
	}
	return &hostPut{p, h.slots}, nil
}

type hostPut struct {
	*store.Put
	slots *staging.Slots
}

// Write writes the whole file.
func (p *hostPut) Write(content func(int64) []byte) error {
	return WritePut(context.Background(), p.slots, p, content(p.Plan().PayloadBytes()))
}

func (h *hostStore) Lookup(space int, keys []uint64, ranks uint64) (Lease, error) {
	ns, err := h.space(context.Background(), space)
	if err != nil {
		return nil, err
	}
	q := store.LookupRequest{Namespace: ns, Ranks: ranks}
	for _, n := range keys {
		q.Keys = append(q.Keys, keyOf(n))
	}
	l, err := h.Store.Lookup(q)
	if err != nil {
		return nil, err
	}
	return &hostLease{l, h.slots}, nil
}

func (h *hostStore) Has(e Entry) (bool, error) {
	ns, err := h.space(context.Background(), e.Space)
	if err != nil {
		return false, err
	}
	l, err := h.Store.Lookup(store.LookupRequest{Namespace: ns, Keys: []kv.Key{keyOf(e.Key)}, Pin: true})
	if err != nil {
		return false, fmt.Errorf("has %s: %w", e, err)
	}
	defer l.Release()
	return l.Hits() == 1, nil
}

func (h *hostStore) Discard(space int, keys []uint64) ([]store.DiscardResult, error) {
	ns, err := h.space(context.Background(), space)
	if err != nil {
		return nil, err
	}
	q := store.DiscardRequest{Namespace: ns}
	for _, n := range keys {
		q.Keys = append(q.Keys, keyOf(n))
	}
	return h.Store.Discard(q)
}

type hostLease struct {
	*store.Lease
	slots *staging.Slots
}

func (l *hostLease) Load(i int, rank uint32) ([]byte, error) {
	p, err := l.Open(i, rank)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	slot, err := l.slots.Acquire(context.Background())
	if err != nil {
		return nil, err
	}
	defer slot.Release()
	payload, err := readPiece(p, slot.Bytes())
	if err != nil {
		p.Bad(err)
	}
	return payload, err
}

// readPiece reads a piece through its open file and verifies all of it.
func readPiece(p *store.Piece, buf []byte) ([]byte, error) {
	if p.Size() < pieceformat.Page || p.Size() > int64(len(buf)) {
		return nil, fmt.Errorf("%w: a file of %d bytes", pieceformat.ErrDamaged, p.Size())
	}
	n, err := p.File().ReadAt(buf[:min(pieceformat.Padded(p.Size()), int64(len(buf)))], 0)
	if int64(n) < p.Size() {
		return nil, errors.Join(err, pieceformat.ErrDamaged)
	}
	head, err := p.Verify(buf[:n])
	if err != nil {
		return nil, err
	}
	if head.Compressed {
		return decode(head, buf[:n])
	}
	data := buf[head.DataOffset:n]
	if err := kv.VerifyExtents(head.Plan, 0, len(head.Table), data, 0, head.Table); err != nil {
		return nil, err
	}
	return slices.Clone(data[:head.Plan.PayloadBytes()]), nil
}

// decode is the payload of a compressed piece.
func decode(head *store.Head, file []byte) ([]byte, error) {
	extents := head.Plan.Extents()
	if err := head.Verify(0, len(extents), file, 0); err != nil {
		return nil, err
	}
	payload := make([]byte, head.Plan.PayloadBytes())
	for i, e := range extents {
		from, to := head.At(i)
		if err := head.Decode(i, payload[e.Off:][:e.Len], file[from:to]); err != nil {
			return nil, err
		}
	}
	return payload, nil
}

// content is the payload of a version of a piece, which begins with the version. That of every third key cannot be
// compressed; the others' upper bytes take few values, as those of floats do.
func content(of Piece, version uint64, size int64) []byte {
	b := make([]byte, size)
	r := rand.New(rand.NewPCG(of.Key<<16|uint64(of.Space)<<8|uint64(of.Rank), version))
	values := [...]uint64{math.MaxUint64, 0x07ff_07ff_07ff_07ff, 0x003f_003f_003f_003f}[of.Key%3]
	for i := 8; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64()&values)
	}
	binary.LittleEndian.PutUint64(b, version)
	return b
}

// versionOf reads the version out of a payload, and says whether the rest belongs to it.
func versionOf(of Piece, payload []byte) (version uint64, ok bool) {
	if len(payload) < 8 {
		return 0, false
	}
	version = binary.LittleEndian.Uint64(payload)
	return version, bytes.Equal(payload, content(of, version, int64(len(payload))))
}

// lesser are file systems that do less than others, and still what they must.
var lesser = []string{
	"read ** 10% seed 1: short\nwrite ** 10% seed 2: short",
	"open,read,write,rename,publish,link,remove,mkdir,sync,allocate ** 5% seed 3: eintr",
	"direct **: einval\nallocate **: enotsup",
	"publish **: einval", // renameat2 takes no flags; links are there
	"stat,readdir ** 2% seed 4: delay 2ms",
}

// TestHistoriesOnFUSE runs histories whose roots are real directories, on a file system that does less than others below the
// kernel. Everything must hold as on any other, with faults of the histories' own on top.
func TestHistoriesOnFUSE(t *testing.T) {
	testenv.Slow(t)
	testenv.Need(t, testenv.FUSE)
	kinds := slices.DeleteFunc(Kinds(), func(k Kind) bool { return k.Name == "memory" })
	tally := testenv.NewTally(t, "fuse-histories")
	m, err := fusefs.New(t.TempDir(), t.TempDir())
	must(t, err)
	defer func() {
		testenv.NoError(t, m.Unmount())
	}()
	seeds := uint64(len(lesser)) // the short run: one history on each
	start, first, length := time.Now(), uint64(0), min(*ops, 24)
	if *histories > 0 {
		first, length = uint64(start.UnixNano()), *ops
	}
	var injected uint64
	for i := uint64(0); (i < seeds || time.Since(start) < *histories) && !t.Failed(); i++ {
		h := Generate(cmp.Or(*seed, first+i*7+1), length)
		if !slices.ContainsFunc(kinds, func(k Kind) bool { return k.Name == h.Kind.Name }) {
			continue
		}
		rules := lesser[i%uint64(len(lesser))]
		must(t, m.Set(rules))
		res, err := runIn(t, h, m.Dir)
		tally.Add(int64(len(res.Results)), res.Killed, 1)
		n, ierr := m.Injected()
		injected += n
		if err != nil || ierr != nil {
			t.Errorf("seed %d, kind %s, on a file system with %q: %v, %v", h.Seed, h.Kind.Name, strings.ReplaceAll(rules, "\n", "; "), err, ierr)
		}
	}
	if injected == 0 {
		t.Error("the file system did all that others do")
	}
}
