package host

import "github.com/kvhost/kvhost/host/internal/proto"

// Status returns the part of the status that the server does not know.
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
