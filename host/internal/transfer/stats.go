package transfer

import "sync/atomic"

type counters struct {
	storedFiles, storedBytes, storeErrors, storesShed atomic.Int64
	loadedFiles, loadedBytes, loadErrors              atomic.Int64
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
}

func (e *Engine) Stats() Stats {
	c := &e.stats
	return Stats{
		StoredFiles: c.storedFiles.Load(), StoredBytes: c.storedBytes.Load(), StoreErrors: c.storeErrors.Load(),
		StoresShed:  c.storesShed.Load(),
		LoadedFiles: c.loadedFiles.Load(), LoadedBytes: c.loadedBytes.Load(), LoadErrors: c.loadErrors.Load(),
		SlotsInUse: e.slots.InUse(), Slots: e.slots.Capacity(),
	}
}
