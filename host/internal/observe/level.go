package observe

import (
	"fmt"
	"strconv"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

var ofLevel = of[store.LevelStats]("level",
	figure{"Hits", "level_hits_total", "hits", "Keys that lookups found in the level."},
	figure{from: "Loaded", status: "loaded_bytes"},
	figure{from: "Volatile", status: "volatile"},
	figure{from: "Kept", status: "kept"},
	figure{from: "Published", status: "published"},
	figure{from: "PrefetchesUsed", status: "prefetch_used"},
	figure{from: "PrefetchesWasted", status: "prefetch_wasted"},
)

var ofMoves = of[store.MoveStats]("level kind",
	figure{"Bytes", "level_moved_bytes_total", "_bytes", "Bytes copied from other levels to the level."},
	figure{from: "Shed", status: "_shed"},
)

var (
	levelKept    = newFamily("level_kept_ratio", "Part of the chunks of a level in memory that another level has too, which outlive the host.", "level")
	levelMoves   = newFamily("level_moves_total", "Copies from other levels to the level.", "level kind result")
	levelFetched = newFamily("level_prefetches_total",
		"Copies to the level that lookups asked for, and that were loaded afterwards (used) or went without (wasted).", "level result")
)

func collectLevels(out series, st *store.Stats) {
	for i := range st.Levels {
		l := &st.Levels[i]
		level := strconv.Itoa(l.Level)
		ofLevel.put(out, l, level)
		out.put(levelFetched, float64(l.PrefetchesUsed), level, "used")
		out.put(levelFetched, float64(l.PrefetchesWasted), level, "wasted")
		if l.Volatile > 0 {
			out.put(levelKept, float64(l.Kept)/float64(l.Volatile), level)
		}
		for kind := range l.Moves {
			m, k := &l.Moves[kind], moves.Kind(kind).String()
			ofMoves.put(out, m, level, k)
			out.put(levelMoves, float64(m.Done), level, k, "done")
			out.put(levelMoves, float64(m.Shed), level, k, "shed")
			out.put(levelMoves, float64(m.Refused), level, k, "refused")
			out.put(levelMoves, float64(m.Cancelled), level, k, "cancelled")
			out.put(levelMoves, float64(m.Failed), level, k, "failed")
		}
	}
}

// countLevels adds the figures of levels to the counters of the status. For a store with one level there are none.
func countLevels(out map[string]uint64, st *store.Stats) {
	if len(st.Levels) < 2 {
		return
	}
	for i := range st.Levels {
		l := &st.Levels[i]
		level := fmt.Sprintf("level%d_", l.Level)
		ofLevel.count(out, level, l)
		for kind := range l.Moves {
			m, k := &l.Moves[kind], level+moves.Kind(kind).String()
			out[k] = m.Done
			ofMoves.count(out, k, m)
		}
	}
}
