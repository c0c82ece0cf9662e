package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// ShareWithdrawals shares a word in an arena, at an offset that is a multiple of 8, so that stores which start from now on can be
// withdrawn. A session can share one. A host that does not know the message refuses it.
func (s *Session) ShareWithdrawals(ctx context.Context, a *Arena, offset int64) error {
	if offset < 0 || offset%8 != 0 || offset > int64(len(a.data))-8 {
		return fmt.Errorf("%w: a word at %d does not fit %d bytes", ErrArena, offset, len(a.data))
	}
	tag, err := s.pass(ctx, a)
	if err != nil {
		return err
	}
	m := &proto.Withdrawals{Memfd: tag, Offset: uint64(offset)}
	if _, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Withdrawals{Withdrawals: m}}); err != nil {
		return err
	}
	s.withdrawn.Store((*uint64)(unsafe.Pointer(&a.data[offset])))
	return nil
}

// Withdraw takes the store back, and all stores of the session that started before it. It does not wait for the host, which may be
// stopped: their blocks may be used again when it returns. The host publishes of them only what it had read before. It reports false,
// and does nothing, where the session had shared no word when the store began.
func (j *StoreJob) Withdraw() bool {
	if j.withdrawn == nil {
		return false
	}
	for last := atomic.LoadUint64(j.withdrawn); last < j.id; last = atomic.LoadUint64(j.withdrawn) {
		atomic.CompareAndSwapUint64(j.withdrawn, last, j.id)
	} // the last load keeps what the caller writes to the blocks behind the word
	return true
}
