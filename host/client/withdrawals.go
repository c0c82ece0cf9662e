package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// ShareWithdrawals shares a word in an arena, at an offset that is a multiple of 8. Stores that start from then on can be withdrawn. A
// session can share one word. A host that does not know the message refuses it.
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

// Withdraw takes back the store and all stores of the session that started before it. It does not wait for the host, which may be stopped:
// when Withdraw returns, their blocks may be reused. The host publishes only the chunks that it had read before. If the session had not
// shared a word when the store began, Withdraw does nothing and returns false.
func (j *StoreJob) Withdraw() bool {
	if j.withdrawn == nil {
		return false
	}
	for last := atomic.LoadUint64(j.withdrawn); last < j.id; last = atomic.LoadUint64(j.withdrawn) {
		atomic.CompareAndSwapUint64(j.withdrawn, last, j.id)
	} // the last load keeps later writes to the blocks behind the write of the word
	return true
}
