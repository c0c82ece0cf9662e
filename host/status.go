package host

import "github.com/kvhost/kvhost/host/internal/proto"

// Status is the part of the Status call that the server cannot answer itself.
func (h *Host) Status() *proto.StatusResponse {
	out := h.figures.Status()
	select {
	case <-h.Ready():
		out.Serving = true
	default:
	}
	out.NotReady = h.notReady(out)
	return out
}
