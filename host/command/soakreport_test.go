package command

import (
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"
)

// soakTable is what the hosts did, side by side.
func soakTable(sides []*soakSide) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	row := func(name string, cell func(*soakSide) string) {
		fmt.Fprintf(w, "%s", name)
		for _, s := range sides {
			fmt.Fprintf(w, "\t%s", cell(s))
		}
		fmt.Fprintln(w)
	}
	row("", func(s *soakSide) string { return s.name })
	for i, op := range honestOps {
		row(op+" p99 (ms)", func(s *soakSide) string { return fmt.Sprintf("%.2f", s.p99(i)) })
	}
	row("honest sessions", func(s *soakSide) string { return fmt.Sprint(s.sessions) })
	row("hits of keys", func(s *soakSide) string { return fmt.Sprintf("%.2f %% of %d", 100*s.share(), s.keys) })
	row("bytes compared, wrong", func(s *soakSide) string { return fmt.Sprintf("%d  %d", s.compared, s.wrong) })
	row("chunks stored, not stored, not loaded", func(s *soakSide) string { return fmt.Sprintf("%d  %d  %d", s.stored, s.refused, s.lost) })
	row("found no room, unanswered, faults of evict policies", func(s *soakSide) string {
		var list []string
		for _, name := range []string{"kvhost_root_sheds_total", "kvhost_root_unanswered_total", "kvhost_root_evict_faults_total"} {
			list = append(list, fmt.Sprint(gauge(s.T, s.address, name)))
		}
		return strings.Join(list, "  ")
	})
	row("attacks by clients", func(s *soakSide) string { return fmt.Sprint(s.attacks) })
	row("resident MiB by quarter", func(s *soakSide) string {
		var q []string
		for i := range 4 {
			q = append(q, fmt.Sprint(s.quarter(i, residentBytes)>>20))
		}
		return strings.Join(q, " ")
	})
	row("resident MiB per hour", func(s *soakSide) string { return fmt.Sprintf("%+.1f", s.slope()/(1<<20)) })
	row("goroutines, files, first to last", func(s *soakSide) string {
		a, z := s.samples[0], s.samples[len(s.samples)-1]
		return fmt.Sprintf("%d-%d  %d-%d", a.goroutines, z.goroutines, a.files, z.files)
	})
	w.Flush()
	return b.String()
}

// slope is by how many bytes an hour the resident memory grows, by least squares over all but the first quarter.
func (s *soakSide) slope() float64 {
	list := s.samples[len(s.samples)/4:]
	var x, y, xx, xy float64
	for _, v := range list {
		at := v.at.Hours()
		x, y, xx, xy = x+at, y+float64(v.resident), xx+at*at, xy+at*float64(v.resident)
	}
	n := float64(len(list))
	if d := n*xx - x*x; d > 0 {
		return (n*xy - x*y) / d
	}
	return 0
}

// judgeSoak compares the hosts. Times and memory mean something only after a while.
func judgeSoak(t *testing.T, sides []*soakSide, all bool) {
	t.Helper()
	control, attacked := sides[0], sides[1]
	for _, s := range sides {
		if s.wrong > 0 || s.compared == 0 || s.hits == 0 || s.stored == 0 {
			t.Errorf("%s: %d wrong bytes of %d, %d hits, %d stored, %d sessions", s.name, s.wrong, s.compared, s.hits,
				s.stored, s.sessions)
		}
	}
	if attacked.attacks == 0 {
		t.Error("the attacked host met no attack")
	}
	var line strings.Builder
	for i, op := range honestOps {
		a, c := attacked.p99(i), control.p99(i)
		ratio := a / max(0.001, c)
		fmt.Fprintf(&line, "%s_p99_ratio=%.2f ", op, ratio)
		if all && ratio > soakSlower {
			t.Errorf("%s: 99th percentile %.2f ms, %.2f ms without attackers", op, a, c)
		}
	}
	hits := attacked.share() / control.share()
	from, to := attacked.quarter(1, residentBytes), attacked.quarter(3, residentBytes)
	t.Logf("%shits_ratio=%.3f wrong_bytes=%d resident_from=%d resident_to=%d resident_per_hour=%.0f", line.String(), hits,
		control.wrong+attacked.wrong, from, to, attacked.slope())
	if !all {
		return
	}
	if hits < soakLeast {
		t.Errorf("%.3f of the control's hits", hits)
	}
	if float64(to-from) > soakGrowth*float64(from)+soakGrowthBy {
		t.Errorf("memory grew from %d to %d MiB", from>>20, to>>20)
	}
	for what, of := range map[string]func(soakSample) int64{
		"goroutines":  func(x soakSample) int64 { return x.goroutines },
		"descriptors": func(x soakSample) int64 { return x.files },
	} {
		if from, to := attacked.quarter(1, of), attacked.quarter(3, of); to > from+from/4+8 {
			t.Errorf("%s grew from %d to %d", what, from, to)
		}
	}
}
