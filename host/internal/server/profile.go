package server

import (
	"go.opentelemetry.io/otel/attribute"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// profile is what HELLO says of a session, and the counters of its model and tenant. A nil profile, of a session before
// HELLO, counts nothing.
type profile struct {
	status *proto.SessionStatus
	usage  *Usage
	spans  []attribute.KeyValue
}

// newProfile is of a session after its HELLO was accepted. device is empty for host memory.
func newProfile(t *UsageTable, number uint64, digest string, m *proto.Hello, device string) *profile {
	model := m.GetNamespace().GetModel()
	return &profile{usage: t.Of(model, m.GetTenant()), spans: sessionAttributes(number, digest, m), status: &proto.SessionStatus{
		Number: number, Engine: m.GetEngine(), Role: m.GetRole(), Rank: m.GetRank(), Tenant: m.GetTenant(), Model: model,
		Device: device, Since: timestamppb.Now(),
	}}
}

// Status is a copy without what changes: leases and jobs.
func (p *profile) Status() *proto.SessionStatus { return protobuf.CloneOf(p.status) }

// Attributes are those of the session's spans.
func (p *profile) Attributes() []attribute.KeyValue {
	if p == nil {
		return nil
	}
	return p.spans
}

// LookedUp counts keys of a lookup, and those of them that were granted.
func (p *profile) LookedUp(keys, hits int) {
	if p != nil {
		p.usage.Keys.Add(uint64(keys))
		p.usage.Hits.Add(uint64(hits))
	}
}

// Loaded counts bytes of pages that were delivered.
func (p *profile) Loaded(bytes uint64) {
	if p != nil {
		p.usage.LoadedBytes.Add(bytes)
	}
}

// Stored counts bytes of pages that were published.
func (p *profile) Stored(bytes uint64) {
	if p != nil {
		p.usage.StoredBytes.Add(bytes)
	}
}
