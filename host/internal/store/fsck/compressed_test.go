package fsck

import (
	"context"
	"encoding/binary"
	"maps"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// TestCompressedPieces verifies compressed pieces: a flipped bit, a table that contradicts itself, and extents that have the
// right checksums and are not what an encoder writes, or decode to other pages.
func TestCompressedPieces(t *testing.T) {
	r := newRig(t, 1<<30)
	r.store.Close()
	r.openRoot(store.RootConfig{Path: r.dir, Capacity: 1 << 30, Compressed: true})
	const most = 8
	for n := range uint64(most) {
		p, err := r.store.Put(context.Background(), store.PutRequest{Namespace: r.space, Key: key(n)})
		must(t, err)
		payload := []byte(strings.Repeat("KV", int(p.Plan().PayloadBytes()/2)))
		payload[n*50+7]++ // or its planes repeat one byte
		must(t, storetest.Store(context.Background(), r.slots, p, payload))
	}
	names := r.pieces(most)
	report := r.check(Options{})
	if report.Err() != nil || report.Compressed.Files != most || report.Compressed.Bytes != report.Pieces.Bytes ||
		report.Compressed.Payload < 3*report.Compressed.Bytes || report.Pieces.Bytes != r.store.Stats().Roots[0].Used {
		t.Errorf("%+v", report)
	}
	r.store.Close()

	const table = pieceformat.Page
	want := map[string]Kind{}
	spoil := func(n uint64, kind Kind, how func(b []byte, h *pieceformat.Header)) {
		r.change(names[n], func(b []byte) []byte {
			h, err := pieceformat.DecodeHeader(b)
			must(t, err)
			how(b, &h)
			return b
		})
		want[names[n]] = kind
	}
	// sum makes the checksums of the first extent, of the table and of the header right again.
	sum := func(b []byte, h *pieceformat.Header) {
		le := binary.LittleEndian
		le.PutUint64(b[table+8:], kv.Sum(b[h.DataOffset:][:le.Uint32(b[table+16:])]))
		h.TableSum = xxh3.Hash(b[table:][:24*h.Extents])
		h.Encode(b)
	}
	spoil(1, Damaged, func(b []byte, h *pieceformat.Header) { b[h.DataOffset+3] ^= 4 })
	spoil(2, Damaged, func(b []byte, h *pieceformat.Header) { b[table+16]--; sum(b, h) })
	spoil(3, Damaged, func(b []byte, h *pieceformat.Header) { b[h.DataOffset] = 99; sum(b, h) })
	spoil(4, Damaged, func(b []byte, h *pieceformat.Header) { b[table]++; sum(b, h) })
	spoil(5, Later, func(b []byte, h *pieceformat.Header) { b[table+20] = 77; sum(b, h) })
	if got := kinds(r.check(Options{})); !maps.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	if quick := r.check(Options{Quick: true}); len(quick.Problems) != 0 || quick.Compressed.Files != most {
		t.Errorf("by headers only: %+v", quick)
	}
}
