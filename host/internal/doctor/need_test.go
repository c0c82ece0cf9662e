package doctor

import (
	"fmt"
	"strings"
	"testing"
)

// A report says what full roots need, and warns where the policy, all policies or the machine has less.
func TestNeedsOfFullRoots(t *testing.T) {
	big := Need{Root: "/mnt/kv", Entries: 100_000_000, IndexBytes: 6 << 30, Policy: "prefix", PolicyBytes: 9 << 30, PolicyFits: 40_000_000}
	fits := Need{Root: "/mnt/kv", Entries: 1 << 20, IndexBytes: 64 << 20, Policy: "lru", PolicyBytes: 20 << 20, PolicyFits: 1 << 20}
	for _, c := range []struct {
		needs   []Need
		all     uint64
		machine int64
		want    string // what the warnings are about
	}{
		{[]Need{fits}, 1 << 30, 1 << 34, ""},
		{[]Need{big}, 10 << 30, 1 << 40, "root /mnt/kv"},
		{[]Need{fits, big}, 8 << 30, 1 << 40, "root /mnt/kv, policies"},
		{[]Need{fits, fits}, 30 << 20, 100 << 20, "policies, memory"},
	} {
		r := Report{Facts: Facts{Machine: Machine{MemoryBytes: c.machine}}}
		r.Needs(c.needs, c.all)
		var warned []string
		notes := 0
		for _, f := range r.Findings {
			if f.Level == Warning {
				warned = append(warned, f.About)
			} else if notes++; !strings.Contains(f.Says, fmt.Sprint(c.needs[notes-1].Entries)) {
				t.Errorf("a note says %q", f.Says)
			}
		}
		if got := strings.Join(warned, ", "); got != c.want || notes != len(c.needs) {
			t.Errorf("%d notes, warnings about %q, want %q", notes, got, c.want)
		}
	}
}
