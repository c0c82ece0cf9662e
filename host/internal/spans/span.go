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

// Text returns an attribute of a span. It makes the value valid UTF-8, because OTLP takes nothing else and some texts come from
// clients and file systems.
func Text(key, value string) attribute.KeyValue { return attribute.String(key, valid(value)) }

func valid(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

// Number returns an attribute of a span.
func Number[T ~int | ~int64 | ~uint32 | ~uint64](key string, value T) attribute.KeyValue {
	return attribute.Int64(key, int64(value))
}

// Span is a request or a part of one, from its start to its end. The zero Span belongs to a request that is not sampled.
type Span struct {
	of     *Tracer
	span   trace.Span
	remote bool // the parent is a span of the client
}

// Begin decides whether a request gets a span. If the client has named a span, that span's flag decides, and otherwise the
// sample ratio. Without a span, Begin allocates nothing.
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

// Child returns the span of a request that follows from this one. If this one is not sampled, the child is not either.
func (s *Span) Child(began time.Time) Span { return s.child(trace.SpanKindServer, began) }

// Part returns the span of a part of the request. If the request is not sampled, the part is not either.
func (s *Span) Part(began time.Time) Span { return s.child(trace.SpanKindInternal, began) }

func (s *Span) child(kind trace.SpanKind, began time.Time) Span {
	if !s.On() {
		return Span{}
	}
	return s.of.start(trace.ContextWithSpanContext(context.Background(), s.span.SpanContext()), kind, began, false)
}

// Ended holds the facts with which a span ends. The span keeps no reference to it.
type Ended struct {
	Name       string
	To         time.Time
	Attributes []attribute.KeyValue
	Session    []attribute.KeyValue // attributes that all spans of a session have
	Events     []Event
	Link       *Span // optional
	// Failure is the reason why the request failed, and Code is its error code. Both are empty if it succeeded.
	Failure, Code string
}

// Event is a moment in a span.
type Event struct {
	Name string
	At   time.Time // zero if the event did not happen
}

// End queues the span for export. It never waits. A span that finds no room is dropped and counted.
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
