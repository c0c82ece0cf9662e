package transfer

import (
	"sync/atomic"
	"time"
)

type counters struct {
	storedFiles, storedBytes, storeErrors, storesShed atomic.Int64
	loadedFiles, loadedBytes, loadErrors              atomic.Int64
	encoded, decoded                                  coded
}

// coded counts one direction of the codec.
type coded struct{ pages, stored, took atomic.Int64 }

func (c *coded) add(pages, stored int64, took time.Duration) {
	c.pages.Add(pages)
	c.stored.Add(stored)
	c.took.Add(int64(took))
}

func (c *coded) read() CodecStats {
	return CodecStats{Pages: c.pages.Load(), Stored: c.stored.Load(), Took: time.Duration(c.took.Load())}
}

func (c *counters) stored(bytes int64) {
	c.storedFiles.Add(1)
	c.storedBytes.Add(bytes)
}

func (c *counters) loaded(bytes int64) {
	c.loadedFiles.Add(1)
	c.loadedBytes.Add(bytes)
}

// Stats are an engine's counters since it was made. Bytes are file bytes.
type Stats struct {
	StoredFiles, StoredBytes, StoreErrors int64
	StoresShed                            int64 // pieces that were queued too long
	LoadedFiles, LoadedBytes, LoadErrors  int64
	SlotsInUse, Slots                     int
	Encoded, Decoded                      CodecStats // of pieces that were compressed
}

// CodecStats counts bytes of extents as they are in pages and as they are stored, and the time that the codec took for
// them.
type CodecStats struct {
	Pages, Stored int64
	Took          time.Duration
}

// Stats reads the counters.
func (e *Engine) Stats() Stats {
	c := &e.stats
	return Stats{
		StoredFiles: c.storedFiles.Load(), StoredBytes: c.storedBytes.Load(), StoreErrors: c.storeErrors.Load(),
		StoresShed:  c.storesShed.Load(),
		LoadedFiles: c.loadedFiles.Load(), LoadedBytes: c.loadedBytes.Load(), LoadErrors: c.loadErrors.Load(),
		SlotsInUse: e.slots.InUse(), Slots: e.slots.Capacity(),
		Encoded: c.encoded.read(), Decoded: c.decoded.read(),
	}
}
