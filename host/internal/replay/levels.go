package replay

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// maxLevels is larger than the number of levels of any host.
const maxLevels = 64

// addLevels counts the hits and copies of each level between two Status replies.
func (r *Report) addLevels(before, after *proto.StatusResponse) {
	for n := range uint64(maxLevels) {
		since := func(what string) uint64 {
			name := fmt.Sprintf("level%d_%s", n, what)
			return after.GetCounters()[name] - min(before.GetCounters()[name], after.GetCounters()[name])
		}
		if _, ok := after.GetCounters()[fmt.Sprintf("level%d_loaded_bytes", n)]; ok {
			r.Levels = append(r.Levels, LevelReport{
				Level: n, BytesLoaded: since("loaded_bytes"), Written: since("published"),
				Shed: since("demotion_shed") + since("promotion_shed") + since("through_shed"),
			})
		}
	}
}

// levelRows adds rows about the levels to the table.
func (r *Report) levelRows(row func(name, format string, args ...any)) {
	var all uint64
	for _, l := range r.Levels {
		all += l.BytesLoaded
	}
	for _, l := range r.Levels {
		row(fmt.Sprintf("level %d", l.Level), "%.3f GB loaded (%.1f %%), %d pieces written, %d copies shed",
			float64(l.BytesLoaded)/1e9, 100*float64(l.BytesLoaded)/float64(max(1, all)), l.Written, l.Shed)
	}
}
