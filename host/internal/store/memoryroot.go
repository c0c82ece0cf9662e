package store

import "context"

// memoryRoot is the [kind] of a root in memory, which one host has for itself: an [ownRoot] that is empty after a start. At
// an orderly end it copies what it holds to the next level. Its pieces are read in place, so none is kept compressed, and its
// capacity is a part of memory whatever its file system says.
type memoryRoot struct{ *ownRoot }

func (c memoryRoot) recover(ctx context.Context) error { return c.find(ctx) }
func (c memoryRoot) decodes() bool                     { return true }

func (c memoryRoot) drain(ctx context.Context) {
	if c.leaving.To == nil || !c.r.Health.Serves() {
		return
	}
	kept, left := c.leaving.Drain(ctx)
	c.r.Log.Info("what the root held was copied to the next level", "entries", kept, "left", left, "level",
		c.leaving.To.Number())
}
