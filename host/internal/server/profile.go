package server

import (
	"go.opentelemetry.io/otel/attribute"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// profile is what HELLO says of a session, and the counters of its model and tenant.
type profile struct {
	status *proto.SessionStatus // nil before HELLO
	usage  *Usage
	spans  []attribute.KeyValue // attributes of the session's
}

// noProfile is of a session before HELLO. What it counts is not shown.
var noProfile = &profile{usage: &Usage{}}

// newProfile is of a session after its HELLO was accepted. device is empty for host memory.
func newProfile(t *UsageTable, number uint64, digest string, m *proto.Hello, device string) *profile {
	model := m.GetNamespace().GetModel()
	return &profile{usage: t.Of(model, m.GetTenant()), spans: sessionAttributes(number, digest, m), status: &proto.SessionStatus{
		Number: number, Engine: m.GetEngine(), Role: m.GetRole(), Rank: m.GetRank(), Tenant: m.GetTenant(), Model: model,
		Device: device, Since: timestamppb.Now(), TensorParallel: max(1, m.GetNamespace().GetTensorParallel()),
		Units: m.GetNamespace().GetUnits(),
	}}
}

// Status is a copy without what changes: leases and jobs.
func (p *profile) Status() *proto.SessionStatus { return protobuf.CloneOf(p.status) }
