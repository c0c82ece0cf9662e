package fsck

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
)

// TestWhatTheNextStartGoesBy damages the files of a closed root that spare the next start its scan, or that tell it how
// earlier place policies named files.
func TestWhatTheNextStartGoesBy(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1, 2, 3)
	must(t, r.store.Close())
	if report := r.check(Options{}); len(report.Problems) != 0 {
		t.Fatalf("before: %+v", report.Problems)
	}
	want := map[string]Kind{}
	spoil := func(rel, text string) {
		t.Helper()
		name := filepath.Join(r.dir, rel)
		if text == "" {
			r.change(name, func(b []byte) []byte { b[len(b)-1] ^= 1; return b })
		} else if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		want[name] = Meta
	}
	spoil(pieceformat.CheckpointFile, "")
	spoil(pieceformat.StateFile, "kvstate1 and what is no state")
	spoil(pieceformat.WrittenFile, "many")
	if got := kinds(r.check(Options{})); !maps.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	for _, p := range r.check(Options{Repair: true}).Problems {
		if p.Done == "" || p.Failed != "" {
			t.Errorf("%+v", p)
		}
	}
	if report := r.check(Options{}); len(report.Problems) != 0 {
		t.Errorf("after the repair: %+v", report.Problems)
	}
	r.open(1 << 30)
	for n := uint64(1); n <= 3; n++ {
		if !r.hit(n) {
			t.Errorf("key %d is a miss after the repair", n)
		}
	}
}

// TestMembersOfASharedRoot looks at what hosts leave for each other, beside one that runs, and without.
func TestMembersOfASharedRoot(t *testing.T) {
	r := &rig{TB: t, dir: t.TempDir()}
	s, err := store.Open(context.Background(), store.Config{
		HostID: hostID, Roots: []store.RootConfig{
			{Path: r.dir, Capacity: 1 << 30, Shared: true, Poll: 20 * time.Millisecond, Lapse: time.Hour},
		},
	})
	must(t, err)
	t.Cleanup(func() { s.Close() })
	for range 20 { // beside the host, which replaces its files all the time
		if report := r.check(Options{}); len(report.Problems) != 0 {
			t.Fatalf("%+v", report.Problems)
		}
	}
	base := filepath.Join(r.dir, shared.Dir)
	if err := s.Close(); err != nil { // what is put there now nobody clears away
		t.Fatal(err)
	}
	status := filepath.Join(base, "hosts", "y.1", "status")
	beat := filepath.Join(base, "e99", "beat")
	for _, name := range []string{status, beat} {
		must(t, os.MkdirAll(filepath.Dir(name), 0o700))
		must(t, os.WriteFile(name, []byte("kvshare1 0000000000000000\n{}"), 0o600))
	}
	then := time.Now().Add(-48 * time.Hour)
	must(t, os.Chtimes(status, then, then))
	want := map[string]Kind{status: Protocol, beat: Protocol, filepath.Dir(status): Absent}
	for _, repair := range []bool{false, true, false} { // a repair leaves them alone
		report := r.check(Options{Repair: repair})
		if got := kinds(report); !maps.Equal(got, want) || report.Remaining != 2 {
			t.Errorf("found %v, want %v; %d remain", got, want, report.Remaining)
		}
	}
}
