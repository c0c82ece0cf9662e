package server

import (
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// withdrawn returns a function that reports whether the client has withdrawn a STORE. A client withdraws STOREs from a host
// that does not answer, by writing an id to the shared word of withdrawals: all STOREs up to that id are withdrawn. The result
// is nil if the client has shared no such word.
//
// A stopped host may resume in the middle of a copy. The word must therefore be read after the pages: the pages were read in
// time if the word, read later, does not name their STORE yet. Reading the word only before the pages would prove nothing.
func (c *clientMemory) withdrawn(id uint64) func() (back bool, err error) {
	w := c.withdrawals
	if w == nil {
		return nil
	}
	return func() (bool, error) {
		// The processor may delay the loads of the pages past the load of the word; arm64 does so even if the latter has
		// acquire semantics. The store between them prevents that: no load is delayed past a store with release semantics, and
		// that store is not delayed past a load with acquire semantics. The operations of sync/atomic have these semantics.
		var read atomic.Uint32
		read.Store(1)
		word, err := w.Load(0)
		return word >= id, err
	}
}

// shareWithdrawals handles WITHDRAWALS. It takes the descriptor that the message names, even if it fails.
func (c *clientMemory) shareWithdrawals(m *proto.Withdrawals) error {
	region := &proto.Region{Offset: m.GetOffset(), Handle: &proto.Region_Memfd{Memfd: m.GetMemfd()}}
	files := c.takeDescriptors([]*proto.Region{region})
	defer files.close()
	switch {
	case c.withdrawals != nil:
		return faultf(proto.Code_CODE_BUSY, "withdrawals", "the session has shared its word already")
	case m.GetOffset()%8 != 0 || m.GetOffset() > 1<<62:
		return invalid("offset", "%d is no multiple of 8 within any memory", m.GetOffset())
	}
	w := &sharedSemaphores{count: 1}
	if err := c.mapInto(w, region, files); err != nil {
		c.unmapSemaphores(w)
		return err
	}
	c.withdrawals = w
	return nil
}
