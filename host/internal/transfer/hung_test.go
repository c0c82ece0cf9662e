package transfer_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// TestCloseDuringHungRead closes an engine while an abandoned read still uses a slot. The storage failed, not the
// engine: Close logs it and succeeds, and the memory goes when the read returns. In a bubble the limit passes only when all
// else waits, however slow the disk is.
func TestCloseDuringHungRead(t *testing.T) { synctest.Test(t, closeDuringHungRead) }

func closeDuringHungRead(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks, func(c *store.Config) { c.IOTimeout = time.Second })
	b.storeChunks(1)
	var log bytes.Buffer
	engine, err := transfer.New(transfer.Config{
		Threads: 1, SlotBytes: transfer.MinSlotBytes, MaxStaging: 2 * transfer.MinSlotBytes, ReadRatio: 0.75,
		Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	testenv.OK(t, err)
	queue, err := engine.Queue("host")
	testenv.OK(t, err)
	b.fs.Set(faultfs.MustRules("read " + b.pieceOf(0) + ": hang")...)
	defer b.fs.Release()
	l := b.lease(0)
	defer l.Release()
	done := make(chan transfer.Outcome, 1)
	queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: b.spread(1),
		Done: func(o transfer.Outcome) { done <- o }})
	if o := <-done; len(o.Failed) != 1 || !errors.Is(o.Failed[0].Err, staging.ErrHung) {
		t.Fatalf("load of a hung file: got %+v, want 1 chunk failed with ErrHung", o)
	}
	if err := engine.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if !strings.Contains(log.String(), "staging memory stays mapped") || !strings.Contains(log.String(), "slots=1") {
		t.Errorf("log: %s", log.String())
	}
}
