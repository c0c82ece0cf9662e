package client

import (
	"context"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// DiscardResult is the result of a discard for one key.
type DiscardResult uint8

// Results of a discard, with the numbers of the protocol.
const (
	Removed     DiscardResult = 1
	Absent      DiscardResult = 2
	InUse       DiscardResult = 3 // leased, or being loaded or stored
	OtherTenant DiscardResult = 4 // stored by another tenant
	// Unavailable means that the entry is, or may be, in a root that cannot be written to or is still being scanned.
	Unavailable DiscardResult = 5
)

var discardNames = [...]string{
	Removed: "removed", Absent: "absent", InUse: "in use", OtherTenant: "of another tenant", Unavailable: "unavailable",
}

func (r DiscardResult) String() string { return nameOf(discardNames[:], int(r)) }

// Discard removes entries that are no longer needed, with the pieces of every rank. It returns one result for each key.
// Entries in use, and entries that another tenant stored, stay.
func (s *Session) Discard(ctx context.Context, group uint32, keys []kv.Key) ([]DiscardResult, error) {
	m := &proto.Discard{Group: group, Keys: proto.PackKeys(keys, s.hello.Namespace.KeyBytes)}
	r, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Discard{Discard: m}})
	if err != nil {
		return nil, err
	}
	results := make([]DiscardResult, len(r.GetDiscard().GetResults()))
	for i, result := range r.GetDiscard().GetResults() {
		results[i] = DiscardResult(result)
	}
	return results, nil
}
