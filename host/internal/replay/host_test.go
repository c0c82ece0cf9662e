package replay_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/trace"
)

// start runs a host on a real socket with one root, until the test or the returned function ends it.
func start(t *testing.T, root string, capacity int64, change ...func(*config.Config)) (socket string, stop func()) {
	t.Helper()
	c := hosttest.Configuration(t, config.Root{Path: root, Capacity: capacity, ForPieces: true})
	c.Engine.ThreadsPerGPU = 4
	for _, f := range change {
		f(c)
	}
	h, stop := hosttest.Start(t, c)
	return h.Socket(), stop
}

func write(t *testing.T, requests [][]uint64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.jsonl")
	f, err := os.Create(path)
	testenv.OK(t, err)
	defer f.Close()
	w := json.NewEncoder(f)
	for i, ids := range requests {
		q := map[string]any{"timestamp": i, "input_length": len(ids), "output_length": 0, "hash_ids": ids}
		testenv.OK(t, w.Encode(q))
	}
	return path
}

func mixture(t *testing.T, requests int) [][]uint64 {
	t.Helper()
	r, err := trace.Open("../../../examples/traces/mixed.jsonl.zst")
	testenv.OK(t, err)
	defer r.Close()
	all := make([][]uint64, requests)
	for i := range all {
		var q trace.Request
		testenv.OK(t, r.Next(&q))
		all[i] = append([]uint64{}, q.HashIDs...)
	}
	return all
}

func entryBytes(t *testing.T, s replay.Shape) int64 {
	t.Helper()
	n, err := s.EntryBytes(t.Context(), nil, nil)
	testenv.OK(t, err)
	return n
}

// play replays without errors.
func play(t *testing.T, o replay.Options) *replay.Report {
	t.Helper()
	r, err := replay.Run(t.Context(), o)
	testenv.OK(t, err)
	testenv.OK(t, r.Err())
	return r
}
