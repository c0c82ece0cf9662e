package server

import (
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// withdrawn reports whether a STORE was taken back by the word of withdrawals, by which a client does that with a host that does not
// answer. It is nil where the client has shared none.
//
// A host that is stopped may go on at any instruction of a copy. So the word is read after the pages, and never before them alone:
// what a task has read is right if the word, read later, does not name its STORE yet.
func (c *clientMemory) withdrawn(id uint64) func() (back bool, err error) {
	w := c.withdrawals
	if w == nil {
		return nil
	}
	return func() (bool, error) {
		// A load may pass one that follows it, on arm64 even one that acquires. It cannot pass a store that releases, nor that store
		// a load that acquires: sync/atomic's are such.
		var read atomic.Uint32
		read.Store(1)
		word, err := w.Load(0)
		return word >= id, err
	}
}

// shareWithdrawals is WITHDRAWALS. It uses up the descriptor that the message names.
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
