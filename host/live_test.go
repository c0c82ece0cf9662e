package host

import "github.com/kvhost/kvhost/host/proto"

// Live is what a host says of itself to tests.
func (h *Host) Live() *proto.StatusReply { return h.status() }
