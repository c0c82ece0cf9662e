package server

import (
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
)

// discard handles DISCARD. It waits until all earlier STOREs have reserved, because a key that is being stored counts as in
// use. The removal runs on its own goroutine, since a file may be on a disk that hangs. If the session ends first, discard
// returns and lets go of the turn.
func (x *session) discard(message *proto.SessionRequest) error {
	id, m, span := message.Id, message.GetDiscard(), x.server.cfg.Spans.Begin(message)
	group, err := groupOf(x.ns, m.GetGroup())
	if err != nil {
		return err
	}
	n := len(m.GetKeys()) / x.ns.KeyBytes
	if n == 0 {
		return invalid("keys", "none")
	}
	if err := x.cfg.Limits.checkKeys(n); err != nil {
		return err
	}
	keys, err := proto.ParseKeys(nil, m.GetKeys(), x.ns.KeyBytes)
	if err != nil {
		return invalid("keys", "%v", err)
	}
	select {
	case <-x.reserving.Idle():
	case <-x.ctx.Done():
		x.share.Unanswered(id)
		return nil
	}
	done := make(chan error, 1)
	x.server.work.Go(func() {
		results, err := x.server.store.Discard(store.DiscardRequest{
			Namespace: x.engine.space, Group: group.ID, Keys: keys, Tenant: x.tenant,
		})
		if err == nil {
			reply := discardReply(results)
			x.reply(&proto.SessionResponse{Id: id, Body: &proto.SessionResponse_Discard{Discard: reply}})
			span.Discard(x.profile.Load().spans, m, reply)
		}
		done <- err
	})
	select {
	case err := <-done:
		return err
	case <-x.ctx.Done():
		return nil
	}
}
