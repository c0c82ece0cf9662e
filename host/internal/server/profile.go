package server

import (
	"go.opentelemetry.io/otel/attribute"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// profile is the identity of a session as HELLO gave it, with the counters of its model and tenant.
type profile struct {
	status *proto.SessionStatus // nil before HELLO
	usage  *Usage
	spans  []attribute.KeyValue // attributes of all spans of the session
}

// noProfile is the profile of a session before HELLO. Its counters are not reported.
var noProfile = &profile{usage: &Usage{}}

// newProfile returns the profile for an accepted HELLO. device is empty for host memory.
func newProfile(t *UsageTable, number uint64, digest string, m *proto.Hello, device string) *profile {
	model := m.GetNamespace().GetModel()
	return &profile{usage: t.Of(model, m.GetTenant()), spans: sessionAttributes(number, digest, m), status: &proto.SessionStatus{
		Number: number, Engine: m.GetEngine(), Role: m.GetRole(), Rank: m.GetRank(), Tenant: m.GetTenant(), Model: model,
		Device: device, Since: timestamppb.Now(), TensorParallel: max(1, m.GetNamespace().GetTensorParallel()),
		Units: m.GetNamespace().GetUnits(),
	}}
}

// Status returns a copy of the static fields. The caller adds leases and jobs.
func (p *profile) Status() *proto.SessionStatus { return protobuf.CloneOf(p.status) }
