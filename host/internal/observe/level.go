package observe

import (
	"fmt"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// Series of levels.
var levelHits, levelLoad, levelAround, levelMoves, levelBytes, levelFetched = func() (
	hits, load, around, moves, bytes, fetched *prometheus.Desc,
) {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvhost_"+name, help, labels, nil)
	}
	hits = desc("level_hits_total", "Keys that lookups found in the level.", "level")
	load = desc("level_loaded_bytes_total", "Bytes of pieces of the level that were opened for loads.", "level")
	around = desc("level_around_total",
		"Chunks that went to the next level because demotions from the level were behind.", "level")
	moves = desc("level_moves_total", "Copies from other levels to the level.", "level", "kind", "result")
	bytes = desc("level_moved_bytes_total", "Bytes copied from other levels to the level.", "level", "kind")
	fetched = desc("level_prefetches_total", "Copies to the level that lookups asked for, and that were loaded afterwards "+
		"(used) or went without (wasted).", "level", "result")
	return hits, load, around, moves, bytes, fetched
}()

// collectLevels sends the series of levels.
func collectLevels(ch chan<- prometheus.Metric, st *store.Stats) {
	send := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, counter, float64(v), labels...)
	}
	for _, l := range st.Levels {
		level := strconv.Itoa(l.Level)
		send(levelHits, l.Hits, level)
		send(levelLoad, l.Loaded, level)
		send(levelFetched, l.PrefetchesUsed, level, "used")
		send(levelFetched, l.PrefetchesWasted, level, "wasted")
		send(levelAround, l.Around, level)
		for kind, m := range l.Moves {
			k := moves.Kind(kind).String()
			send(levelBytes, m.Bytes, level, k)
			send(levelMoves, m.Done, level, k, "done")
			send(levelMoves, m.Shed, level, k, "shed")
			send(levelMoves, m.Refused, level, k, "refused")
			send(levelMoves, m.Cancelled, level, k, "cancelled")
			send(levelMoves, m.Failed, level, k, "failed")
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
		out[name("hits")], out[name("loaded_bytes")], out[name("around")] = l.Hits, l.Loaded, l.Around
		out[name("published")] = l.Published
		out[name("prefetch_used")], out[name("prefetch_wasted")] = l.PrefetchesUsed, l.PrefetchesWasted
		for kind, m := range l.Moves {
			k := moves.Kind(kind).String()
			out[name(k)], out[name(k+"_bytes")], out[name(k+"_shed")] = m.Done, m.Bytes, m.Shed
		}
	}
}
