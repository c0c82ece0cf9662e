package spans

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Text is an attribute of a span. OTLP takes UTF-8 only, and clients and file systems choose some texts.
func Text(key, value string) attribute.KeyValue { return attribute.String(key, valid(value)) }

func valid(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

// Number is an attribute of a span.
func Number[T ~int | ~int64 | ~uint32 | ~uint64](key string, value T) attribute.KeyValue {
	return attribute.Int64(key, int64(value))
}

// Span is a request, or a part of one, from its begin to its end. The zero Span is of a request that is not sampled.
type Span struct {
	of     *Tracer
	span   trace.Span
	remote bool // the parent is the client's
}

// Begin decides whether a request gets a span: as its client's span does, or by the sample ratio where the client named none.
// Without a span it allocates nothing.
func (t *Tracer) Begin(traceparent string) Span {
	if t == nil || t.off.Load() {
		return Span{}
	}
	if traceparent != "" {
		ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{"traceparent": traceparent})
		if parent := trace.SpanContextFromContext(ctx); parent.IsSampled() {
			return t.start(ctx, trace.SpanKindServer, time.Now(), true)
		} else if parent.IsValid() {
			return Span{}
		}
	}
	if rand.Float64() >= t.ratio {
		return Span{}
	}
	return t.start(context.Background(), trace.SpanKindServer, time.Now(), false)
}

func (t *Tracer) start(ctx context.Context, kind trace.SpanKind, at time.Time, remote bool) Span {
	_, s := t.tracer.Start(ctx, "", trace.WithSpanKind(kind), trace.WithTimestamp(at))
	return Span{of: t, span: s, remote: remote}
}

// On reports whether the request is sampled.
func (s *Span) On() bool { return s.of != nil }

// Remote reports whether the client named the parent.
func (s *Span) Remote() bool { return s.remote }

// Child is a request that follows from this one, or no span if this one is not sampled.
func (s *Span) Child(began time.Time) Span { return s.child(trace.SpanKindServer, began) }

// Part is a part of the request, or no span if this one is not sampled.
func (s *Span) Part(began time.Time) Span { return s.child(trace.SpanKindInternal, began) }

func (s *Span) child(kind trace.SpanKind, began time.Time) Span {
	if !s.On() {
		return Span{}
	}
	return s.of.start(trace.ContextWithSpanContext(context.Background(), s.span.SpanContext()), kind, began, false)
}

// Ended are the facts with which a span ends. Nothing of them is kept.
type Ended struct {
	Name       string
	To         time.Time
	Attributes []attribute.KeyValue
	Session    []attribute.KeyValue // that all spans of a session have
	Events     []Event
	Link       *Span // optional
	// Failure says why the request failed; Code is a word for that. Empty: it did not.
	Failure, Code string
}

// Event is a moment in a span.
type Event struct {
	Name string
	At   time.Time // zero: it did not happen
}

// End queues the span for export. It never waits: a span that finds no room is dropped and counted.
func (s *Span) End(e *Ended) {
	if !s.On() {
		return
	}
	s.span.SetName(e.Name)
	s.span.SetAttributes(e.Session...)
	s.span.SetAttributes(e.Attributes...)
	for _, event := range e.Events {
		if !event.At.IsZero() {
			s.span.AddEvent(event.Name, trace.WithTimestamp(event.At))
		}
	}
	if e.Link != nil && e.Link.On() {
		s.span.AddLink(trace.Link{SpanContext: e.Link.span.SpanContext()})
	}
	if e.Failure != "" {
		s.span.SetAttributes(attribute.String("error.type", e.Code))
		s.span.SetStatus(codes.Error, valid(e.Failure))
	}
	s.span.End(trace.WithTimestamp(e.To))
}
