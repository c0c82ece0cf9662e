package server

import (
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// RequestSpans creates the spans of requests of all sessions. A nil *RequestSpans creates none.
type RequestSpans struct {
	Tracer *spans.Tracer
	Levels map[string]int // level of each root, by its name
}

// requestSpan is the span of a request. The zero value has no span. It is not safe for concurrent use.
type requestSpan struct {
	of   *RequestSpans
	span spans.Span
	link spans.Span // span of the LOOKUP, if the client named another parent for the LOAD
	// Reserved is the time at which a STORE had its places. Read is the time at which its blocks could be reused.
	Reserved, Read time.Time
	Paths          *transfer.Paths // paths of the request's pieces; nil without a span
}

// Begin begins the span of a message. It returns the zero requestSpan if the message is not sampled.
func (r *RequestSpans) Begin(m *proto.SessionRequest) (q requestSpan) {
	if r == nil {
		return q
	}
	if q.span = r.Tracer.Begin(m.GetTraceparent()); q.span.On() {
		q.of, q.Paths = r, &transfer.Paths{}
	}
	return q
}

func (q *requestSpan) Span() spans.Span { return q.span }

// Follow makes the span of a LOAD a child of its LOOKUP's span. If the client has named another parent, it links the two
// instead.
func (q *requestSpan) Follow(r *RequestSpans, lookup spans.Span, at time.Time) {
	switch {
	case q.span.On() && q.span.Remote():
		q.link = lookup
	case !lookup.On():
		*q = requestSpan{}
	default:
		*q = requestSpan{of: r, span: lookup.Child(at), Paths: &transfer.Paths{}}
	}
}

// sessionAttributes returns the attributes of all spans of a session.
func sessionAttributes(number uint64, digest string, m *proto.Hello) []attribute.KeyValue {
	return []attribute.KeyValue{
		spans.Text("kvhost.model", m.GetNamespace().GetModel()), spans.Text("kvhost.namespace", digest),
		spans.Number("kvhost.tenant", m.GetTenant()), spans.Text("kvhost.engine", m.GetEngine()),
		spans.Number("kvhost.rank", m.GetRank()), spans.Number("kvhost.session", number),
	}
}

// Lookup ends the span of a LOOKUP. keys is the number of its keys.
func (q *requestSpan) Lookup(session []attribute.KeyValue, m *proto.Lookup, keys int, r *proto.LookupReply) {
	if !q.span.On() {
		return
	}
	outcome := "hit"
	if r.GetHits() == 0 {
		outcome = "miss"
	} else if int(r.GetHits()) < keys {
		outcome = "partial"
	}
	list := []attribute.KeyValue{
		spans.Number("kvhost.request", m.GetRequest()), spans.Number("kvhost.group", m.GetGroup()), spans.Number("kvhost.keys", keys),
		spans.Number("kvhost.hits", r.GetHits()), spans.Number("kvhost.bytes", r.GetBytes()), spans.Text("kvhost.outcome", outcome),
	}
	if n := len(r.GetLevels()); n > 0 {
		levels, hits := make([]int64, n), make([]int64, n)
		for i, l := range r.GetLevels() {
			levels[i], hits[i] = int64(l.GetLevel()), int64(l.GetChunks())
		}
		list = append(list, attribute.Int64Slice("kvhost.levels", levels), attribute.Int64Slice("kvhost.level_hits", hits))
	}
	q.span.End(&spans.Ended{Name: "kvhost.lookup", To: time.Now(), Session: session, Attributes: list})
}

// Load ends the span of a LOAD.
func (q *requestSpan) Load(session []attribute.KeyValue, m *proto.Load, r *proto.LoadDone) {
	if !q.span.On() {
		return
	}
	e := spans.Ended{Name: "kvhost.load", Session: session, Link: &q.link, Attributes: []attribute.KeyValue{
		spans.Number("kvhost.chunks", len(m.GetChunks())), spans.Number("kvhost.bytes", r.GetBytes()),
		outcome(r.GetFailures(), len(m.GetChunks()), r.GetCancelled()),
	}}
	failure(&e, r.GetFailures(), r.GetCancelled())
	q.end(&e, "kvhost.read")
}

// Store ends the span of a STORE.
func (q *requestSpan) Store(session []attribute.KeyValue, m *proto.Store, r *proto.StorePublished) {
	if !q.span.On() {
		return
	}
	e := spans.Ended{Name: "kvhost.store", Session: session,
		Events: []spans.Event{{Name: "reserved", At: q.Reserved}, {Name: "blocks read", At: q.Read}},
		Attributes: []attribute.KeyValue{
			spans.Number("kvhost.request", m.GetRequest()), spans.Number("kvhost.group", m.GetGroup()),
			spans.Number("kvhost.chunks", len(m.GetChunks())), spans.Number("kvhost.bytes", r.GetBytes()),
			outcome(r.GetFailures(), len(m.GetChunks()), r.GetCancelled()),
		}}
	var counts [len(results)]int
	for _, result := range r.GetResults() {
		if int(result) < len(counts) {
			counts[result]++
		}
	}
	for i, name := range results {
		if name != "" && counts[i] > 0 {
			e.Attributes = append(e.Attributes, spans.Number(name, counts[i]))
		}
	}
	failure(&e, r.GetFailures(), r.GetCancelled())
	q.end(&e, "kvhost.write")
}

// results are the attribute names for the results of a STORE's chunks.
var results = [...]string{
	proto.ChunkResult_CHUNK_RESULT_STORED: "kvhost.stored", proto.ChunkResult_CHUNK_RESULT_RESIDENT: "kvhost.resident",
	proto.ChunkResult_CHUNK_RESULT_REFUSED: "kvhost.refused", proto.ChunkResult_CHUNK_RESULT_SHED: "kvhost.shed",
	proto.ChunkResult_CHUNK_RESULT_FAILED: "kvhost.failed",
}

// Discard ends the span of a DISCARD.
func (q *requestSpan) Discard(session []attribute.KeyValue, m *proto.Discard, r *proto.DiscardReply) {
	if !q.span.On() {
		return
	}
	removed := 0
	for _, result := range r.GetResults() {
		if result == proto.DiscardResult_DISCARD_RESULT_REMOVED {
			removed++
		}
	}
	q.end(&spans.Ended{Name: "kvhost.discard", Session: session, Attributes: []attribute.KeyValue{
		spans.Number("kvhost.group", m.GetGroup()), spans.Number("kvhost.keys", len(r.GetResults())),
		spans.Number("kvhost.removed", removed),
	}}, "")
}

// Refused records the span of a message that was answered with an error.
func (r *RequestSpans) Refused(session []attribute.KeyValue, m *proto.SessionRequest, err *proto.Error) {
	if r == nil {
		return
	}
	var name string
	switch m.GetBody().(type) {
	case *proto.SessionRequest_Lookup:
		name = "kvhost.lookup"
	case *proto.SessionRequest_Load:
		name = "kvhost.load"
	case *proto.SessionRequest_Store:
		name = "kvhost.store"
	case *proto.SessionRequest_Discard:
		name = "kvhost.discard"
	default:
		return
	}
	if q := r.Begin(m); q.span.On() {
		text := err.GetMessage()
		if err.GetField() != "" {
			text = err.GetField() + ": " + text
		}
		q.end(&spans.Ended{Name: name, Session: session, Failure: text, Code: code(err.GetCode()),
			Attributes: []attribute.KeyValue{spans.Text("kvhost.outcome", "refused")}}, "")
	}
}

// end ends the span of a request, and adds a child span for each path that its pieces took.
func (q *requestSpan) end(e *spans.Ended, part string) {
	for _, use := range q.Paths.List() {
		piece := spans.Ended{Name: part, To: use.Ended, Attributes: []attribute.KeyValue{
			spans.Text("kvhost.root", use.Root), spans.Number("kvhost.level", q.of.Levels[use.Root]),
			spans.Text("kvhost.route", use.Route), spans.Number("kvhost.pieces", use.Pieces),
			spans.Number("kvhost.failed", use.Failed), spans.Number("kvhost.bytes", use.Bytes),
		}}
		if use.Failed > 0 && e.Failure != "" {
			piece.Failure, piece.Code = e.Failure, e.Code
		}
		child := q.span.Part(use.Began)
		child.End(&piece)
	}
	e.To = time.Now()
	q.span.End(e)
}

func outcome(failures []*proto.ChunkFailure, chunks int, cancelled bool) attribute.KeyValue {
	word := "ok"
	switch {
	case cancelled:
		word = "cancelled"
	case len(failures) >= chunks && len(failures) > 0:
		word = "failed"
	case len(failures) > 0:
		word = "partial"
	}
	return spans.Text("kvhost.outcome", word)
}

// failure marks a span as failed if chunks have failed. A cancelled job does not count as failed.
func failure(e *spans.Ended, failures []*proto.ChunkFailure, cancelled bool) {
	if len(failures) > 0 && !cancelled {
		e.Failure, e.Code = failures[0].GetMessage(), code(failures[0].GetCode())
	}
}

// code returns the name of an error code without its prefix, as in DAMAGED.
func code(c proto.Code) string { return strings.TrimPrefix(c.String(), "CODE_") }
