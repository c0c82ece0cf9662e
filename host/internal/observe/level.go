package observe

import (
	"fmt"
	"strconv"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

var (
	levelHits    = counted("level_hits_total", "Keys that lookups found in the level.", "level")
	levelLoaded  = counted("level_loaded_bytes_total", "Bytes of pieces of the level that were opened for loads.", "level")
	levelKept    = gauged("level_kept_ratio", "Part of the chunks of a level in memory that another level has too, which outlive the host.", "level")
	levelMoves   = counted("level_moves_total", "Copies from other levels to the level.", "level kind result")
	levelMoved   = counted("level_moved_bytes_total", "Bytes copied from other levels to the level.", "level kind")
	levelFetched = counted("level_prefetches_total",
		"Copies to the level that lookups asked for, and that were loaded afterwards (used) or went without (wasted).", "level result")
)

func collectLevels(out series, st *store.Stats) {
	for _, l := range st.Levels {
		level := strconv.Itoa(l.Level)
		out.put(levelHits, float64(l.Hits), level)
		out.put(levelLoaded, float64(l.Loaded), level)
		out.put(levelFetched, float64(l.PrefetchesUsed), level, "used")
		out.put(levelFetched, float64(l.PrefetchesWasted), level, "wasted")
		if l.Volatile > 0 {
			out.put(levelKept, float64(l.Kept)/float64(l.Volatile), level)
		}
		for kind, m := range l.Moves {
			k := moves.Kind(kind).String()
			out.put(levelMoved, float64(m.Bytes), level, k)
			out.put(levelMoves, float64(m.Done), level, k, "done")
			out.put(levelMoves, float64(m.Shed), level, k, "shed")
			out.put(levelMoves, float64(m.Refused), level, k, "refused")
			out.put(levelMoves, float64(m.Cancelled), level, k, "cancelled")
			out.put(levelMoves, float64(m.Failed), level, k, "failed")
		}
	}
}

// levelCounters are the figures of levels by name, for the Status call: of a store with one level there are none.
func levelCounters(st *store.Stats, out map[string]uint64) {
	if len(st.Levels) < 2 {
		return
	}
	for _, l := range st.Levels {
		name := func(what string) string { return fmt.Sprintf("level%d_%s", l.Level, what) }
		out[name("hits")], out[name("loaded_bytes")] = l.Hits, l.Loaded
		if l.Volatile > 0 {
			out[name("volatile")], out[name("kept")] = l.Volatile, l.Kept
		}
		out[name("published")] = l.Published
		out[name("prefetch_used")], out[name("prefetch_wasted")] = l.PrefetchesUsed, l.PrefetchesWasted
		for kind, m := range l.Moves {
			k := moves.Kind(kind).String()
			out[name(k)], out[name(k+"_bytes")], out[name(k+"_shed")] = m.Done, m.Bytes, m.Shed
		}
	}
}
