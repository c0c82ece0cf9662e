package server

import (
	"context"
	"log/slog"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// stream is the server's side of the gRPC stream.
type stream interface {
	Context() context.Context
	Send(*proto.SessionResponse) error
	Recv() (*proto.SessionRequest, error)
}

// line is the stream of a session together with the state for answering on it.
type line struct {
	stream stream
	ctx    context.Context // done when the session has to end
	end    context.CancelCauseFunc
	log    *slog.Logger
	number uint64 // names the session in logs
	nonce  [proto.NonceBytes]byte
	lastID uint64 // id of the last message; used by the reader only
	out    *sendQueue
	share  *budget.Session // account of the resources that the client occupies
}

func (l *line) reply(m *proto.SessionResponse) {
	var bytes int64
	switch m.Body.(type) {
	case *proto.SessionResponse_StoreRead, *proto.SessionResponse_LoadLayer: // not the last answer to the message
	default:
		bytes = l.share.Answered(m.Id)
	}
	l.out.Push(outgoing{SessionResponse: m, Bytes: bytes})
}

func (l *line) done(id uint64) {
	l.reply(&proto.SessionResponse{Id: id, Body: &proto.SessionResponse_Done{Done: &proto.Done{}}})
}

// doneUnless answers Done if err is nil. It returns err.
func (l *line) doneUnless(id uint64, err error) error {
	if err == nil {
		l.done(id)
	}
	return err
}

func (l *line) fail(id uint64, err error) { l.reply(l.refusal(id, err)) }

func (l *line) refusal(id uint64, err error) *proto.SessionResponse {
	l.log.Debug("message refused", "id", id, "error", err)
	return &proto.SessionResponse{Id: id, Body: &proto.SessionResponse_Error{Error: message(err)}}
}
