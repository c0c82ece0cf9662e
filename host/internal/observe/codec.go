package observe

import (
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store"
)

// Figures of the cost and the gain of compression.
var (
	codecPages   = newFamily("codec_page_bytes_total", "Page bytes of extents that were compressed or decompressed.", "direction model")
	codecStored  = newFamily("codec_stored_bytes_total", "Bytes that the same extents take in files.", "direction model")
	codecSeconds = newFamily("codec_seconds_total", "Time of the codec, on one core.", "direction model")
	codecPlain   = newFamily("codec_plain_bytes_total",
		"Page bytes of pieces that were not compressed because it would not be worth it.", "model")
)

func collectCodec(out series, s *store.Store) {
	for _, m := range s.Compression() {
		for _, way := range []struct {
			name string
			f    codec.Flow
		}{{"store", m.Encoded}, {"load", m.Decoded}} {
			out.put(codecPages, float64(way.f.Pages), way.name, m.Model)
			out.put(codecStored, float64(way.f.Stored), way.name, m.Model)
			out.put(codecSeconds, way.f.Took.Seconds(), way.name, m.Model)
		}
		out.put(codecPlain, float64(m.Plain), m.Model)
	}
}
