package replay

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Report is the result of a replay. Its JSON form is the output of `kvhost replay --json`.
type Report struct {
	Trace           string         `json:"trace"`
	Requests        int64          `json:"requests"`
	Accesses        int64          `json:"accesses"` // requested chunks
	Hits            int64          `json:"hits"`     // chunks loaded and verified
	HitRatio        float64        `json:"hit_ratio"`
	BytesLoaded     int64          `json:"bytes_loaded"` // page bytes of all ranks
	BytesStored     int64          `json:"bytes_stored"`
	MismatchedBytes int64          `json:"mismatched_bytes"`
	Seconds         float64        `json:"seconds"`
	Sessions        int            `json:"sessions"`
	Ranks           int            `json:"ranks"`
	ChunkBytes      int64          `json:"chunk_bytes"` // page bytes of one rank
	Stored          int64          `json:"stored"`      // number of chunks, by the result of their store
	Resident        int64          `json:"resident"`
	Refused         int64          `json:"refused"`
	Shed            int64          `json:"shed"`
	FailedStores    int64          `json:"failed_stores"`
	FailedLoads     int64          `json:"failed_loads"`
	Lookup          Latency        `json:"lookup"`
	Load            Latency        `json:"load"`
	Store           Latency        `json:"store"`
	Levels          []LevelReport  `json:"levels,omitempty"` // nearest first; empty for a host with one level
	Policies        []PolicyReport `json:"policies"`
	PolicyShare     float64        `json:"policy_ns_per_access"` // nanoseconds spent in all policies

	firstErrors
}

// firstErrors holds the first error of each kind.
type firstErrors struct{ failure, mismatch error }

// Latency describes the calls of one kind. A request makes at most one, unless it is very long.
type Latency struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50_ms"`
	P95   float64 `json:"p95_ms"`
	P99   float64 `json:"p99_ms"`
	Max   float64 `json:"max_ms"`
}

// PolicyReport counts the work of a module in one role during the replay.
type PolicyReport struct {
	Role    string  `json:"role"`
	Module  string  `json:"module"`
	Digest  string  `json:"digest"`
	Calls   uint64  `json:"calls"`
	Records uint64  `json:"records"`
	Seconds float64 `json:"seconds"`
	Faults  uint64  `json:"faults"`
}

// LevelReport counts the hits in one level, the bytes written to it, and the copies to it that requests waited for.
type LevelReport struct {
	Level       uint64 `json:"level"`
	BytesLoaded uint64 `json:"bytes_loaded"` // bytes of files
	Written     uint64 `json:"written"`      // pieces, new ones and copies
	Shed        uint64 `json:"shed"`         // shed copies of other kinds than prefetches
}

func newReport(o *Options, t *tally, elapsed time.Duration) *Report {
	r := &Report{
		Trace: o.Trace, Requests: t.requests, Accesses: t.accesses, Hits: t.hits,
		BytesLoaded: t.bytesLoaded, BytesStored: t.bytesStored, MismatchedBytes: t.mismatched,
		Seconds:  elapsed.Seconds(),
		Sessions: o.Sessions, Ranks: o.Shape.Ranks, ChunkBytes: o.Shape.ChunkBytes,
		Stored: t.kept, Resident: t.resident, Refused: t.refused, Shed: t.shed,
		FailedStores: t.failedStores, FailedLoads: t.failedLoads,
		Lookup: latency(t.lookups), Load: latency(t.loads), Store: latency(t.stores),
		Policies: []PolicyReport{}, firstErrors: firstErrors{t.firstFailure, t.firstMismatch},
	}
	if t.accesses > 0 {
		r.HitRatio = float64(t.hits) / float64(t.accesses)
	}
	return r
}

// latency returns the summary of some times.
func latency(times []time.Duration) Latency {
	n := len(times)
	if n == 0 {
		return Latency{}
	}
	slices.Sort(times)
	millis := func(q float64) float64 { return float64(times[max(1, int(math.Ceil(q*float64(n))))-1]) / 1e6 }
	return Latency{Count: uint64(n), P50: millis(0.5), P95: millis(0.95), P99: millis(0.99), Max: millis(1)}
}

// Err returns nil if the host stored and served every chunk correctly.
func (r *Report) Err() error {
	switch {
	case r.MismatchedBytes > 0:
		return fmt.Errorf("%w: %d, first in %w", ErrMismatch, r.MismatchedBytes, r.mismatch)
	case r.FailedStores+r.FailedLoads > 0:
		return fmt.Errorf("%w: %d stores, %d loads, first: %w", ErrFailures, r.FailedStores, r.FailedLoads, r.failure)
	}
	return nil
}

// addPolicies counts the work of policies between two Status replies. Instances of a module in one role, such as one
// per root, are one line. A policy that was replaced in between counts from its last start, and one that is gone does
// not count.
func (r *Report) addPolicies(before, after *proto.StatusResponse) {
	earlier := policySums(before)
	for name, sum := range policySums(after) {
		p := *sum
		if q := earlier[name]; q != nil && q.Calls <= p.Calls {
			p.Calls -= q.Calls
			p.Records -= q.Records
			p.Faults -= q.Faults
			p.Seconds -= q.Seconds
		}
		r.Policies = append(r.Policies, p)
	}
	r.PolicyShare = r.share("")
	slices.SortFunc(r.Policies, func(a, b PolicyReport) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Module, b.Module), cmp.Compare(a.Digest, b.Digest))
	})
}

// policySums adds up the instances of each module in each role.
func policySums(s *proto.StatusResponse) map[[3]string]*PolicyReport {
	sums := map[[3]string]*PolicyReport{}
	for _, p := range s.GetPolicies() {
		role := proto.Word(p.GetRole())
		name := [3]string{role, p.GetModule(), p.GetDigest()}
		q := sums[name]
		if q == nil {
			q = &PolicyReport{Role: role, Module: p.GetModule(), Digest: p.GetDigest()}
			sums[name] = q
		}
		q.Calls += p.GetCalls()
		q.Records += p.GetRecords()
		q.Faults += p.GetFaults()
		q.Seconds += p.GetTime().AsDuration().Seconds()
	}
	return sums
}

// Table writes the report for people.
func (r *Report) Table(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s\t"+format+"\n", append([]any{name}, args...)...)
	}
	row("requests", "%d in %.1f s, %d sessions, %d ranks", r.Requests, r.Seconds, r.Sessions, r.Ranks)
	row("chunk accesses", "%d", r.Accesses)
	row("hits", "%d (hit ratio %.4f)", r.Hits, r.HitRatio)
	row("loaded", "%s", r.volume(r.BytesLoaded))
	row("stored", "%s", r.volume(r.BytesStored))
	r.levelRows(row)
	row("store results", "%d stored, %d resident, %d refused, %d shed, %d failed", r.Stored, r.Resident, r.Refused,
		r.Shed, r.FailedStores)
	for _, l := range []struct {
		name string
		of   Latency
	}{{"lookup", r.Lookup}, {"load", r.Load}, {"store", r.Store}} {
		row(l.name, "p50 %.3f ms, p99 %.3f ms, max %.3f ms (%d)", l.of.P50, l.of.P99, l.of.Max, l.of.Count)
	}
	for _, p := range r.Policies {
		row("policy "+p.Role, "%s (%s): %d calls, %d records, %.3f s%s", p.Module, shortDigest(p.Digest), p.Calls,
			p.Records, p.Seconds, faults(p.Faults))
	}
	if r.Accesses > 0 && len(r.Policies) > 0 {
		var parts []string
		for _, role := range r.roles() {
			parts = append(parts, fmt.Sprintf("%s %.0f", role, r.share(role)))
		}
		row("policy share", "%.0f ns per chunk access (%s)", r.PolicyShare, strings.Join(parts, ", "))
	}
	if r.FailedLoads > 0 {
		row("failed loads", "%d", r.FailedLoads)
	}
	row("mismatched bytes", "%d", r.MismatchedBytes)
	return w.Flush()
}

// share returns the time spent in the policies of a role, or of all roles if role is empty, in nanoseconds per chunk access.
func (r *Report) share(role string) float64 {
	var seconds float64
	for _, p := range r.Policies {
		if role == "" || p.Role == role {
			seconds += p.Seconds
		}
	}
	return seconds * 1e9 / float64(max(1, r.Accesses))
}

// roles returns the roles in Policies, in their order.
func (r *Report) roles() (list []string) {
	for _, p := range r.Policies {
		if !slices.Contains(list, p.Role) {
			list = append(list, p.Role)
		}
	}
	return list
}

func (r *Report) volume(n int64) string {
	perSecond := 0.0
	if r.Seconds > 0 {
		perSecond = float64(n) / 1e9 / r.Seconds
	}
	if n < 1e9 {
		return fmt.Sprintf("%.3f MB (%.3f GB/s)", float64(n)/1e6, perSecond)
	}
	return fmt.Sprintf("%.3f GB (%.3f GB/s)", float64(n)/1e9, perSecond)
}

func shortDigest(d string) string {
	if len(d) > 12 && strings.Trim(d, "0123456789abcdef") == "" {
		return d[:12]
	}
	return d
}

func faults(n uint64) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(", %d faults", n)
}
