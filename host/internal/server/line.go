package server

import (
	"context"
	"log/slog"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// stream is the server's end of the gRPC stream.
type stream interface {
	Context() context.Context
	Send(*proto.SessionResponse) error
	Recv() (*proto.SessionRequest, error)
}

// line is a session's stream, and what it takes to answer on it.
type line struct {
	stream stream
	ctx    context.Context // done when the session is to end
	end    context.CancelCauseFunc
	log    *slog.Logger
	number uint64 // names the session in logs
	nonce  [proto.NonceBytes]byte
	lastID uint64 // the id of the last message; only the reader uses it
	out    *sendQueue
	share  *budget.Session // the account of what the client makes the host hold
}

func (l *line) reply(m *proto.SessionResponse) {
	var bytes int64
	switch m.Body.(type) {
	case *proto.SessionResponse_StoreRead, *proto.SessionResponse_LoadLayer: // more answers follow
	default:
		bytes = l.share.Answered(m.Id)
	}
	l.out.Push(outgoing{SessionResponse: m, Bytes: bytes})
}

func (l *line) done(id uint64) {
	l.reply(&proto.SessionResponse{Id: id, Body: &proto.SessionResponse_Done{Done: &proto.Done{}}})
}

// doneUnless answers Done unless err is set, which it returns.
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
