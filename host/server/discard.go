package server

import (
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/store"
)

// discard is DISCARD. Stores that came before it are reserved first: a key that is being stored is in use. Files may be on
// a disk that hangs, so their removal has its own goroutine: if the session ends, the turn passes on.
func (x *session) discard(id uint64, m *proto.Discard) error {
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
			x.reply(&proto.HostMessage{Id: id, Body: &proto.HostMessage_Discard{Discard: discardReply(results)}})
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

var discardResults = [...]proto.DiscardResult{
	store.DiscardAbsent:      proto.DiscardResult_DISCARD_RESULT_ABSENT,
	store.DiscardRemoved:     proto.DiscardResult_DISCARD_RESULT_REMOVED,
	store.DiscardInUse:       proto.DiscardResult_DISCARD_RESULT_IN_USE,
	store.DiscardOtherTenant: proto.DiscardResult_DISCARD_RESULT_OTHER_TENANT,
	store.DiscardUnavailable: proto.DiscardResult_DISCARD_RESULT_UNAVAILABLE,
}

func discardReply(results []store.DiscardResult) *proto.DiscardReply {
	r := &proto.DiscardReply{Results: make([]proto.DiscardResult, len(results))}
	for i, result := range results {
		r.Results[i] = discardResults[result]
	}
	return r
}
