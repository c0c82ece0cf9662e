package spans

import (
	"encoding/binary"
	"math/rand/v2"
	"time"
)

// Span is a request, or a part of one, from its begin to its end. The zero Span is of a request that is not sampled.
type Span struct {
	tracer *Tracer
	trace  [16]byte
	id     [8]byte
	parent [8]byte // zeros: it is the trace's first
	remote bool    // the parent is the client's
}

// Begin decides whether a request gets a span: as its client's span does, or by the sample ratio where the client named none.
// It allocates nothing.
func (t *Tracer) Begin(traceparent string) Span {
	if t == nil {
		return Span{}
	}
	c := t.current.Load()
	if c == nil {
		return Span{}
	}
	s := Span{tracer: t}
	if p, ok := parse(traceparent); ok {
		if !p.sampled {
			return Span{}
		}
		s.trace, s.parent, s.remote = p.trace, p.id, true
	} else {
		if rand.Float64() >= c.Ratio {
			return Span{}
		}
		binary.BigEndian.PutUint64(s.trace[:], rand.Uint64())
		binary.BigEndian.PutUint64(s.trace[8:], rand.Uint64()|1) // never all zeros
	}
	s.id = newID()
	return s
}

func newID() (id [8]byte) {
	binary.BigEndian.PutUint64(id[:], rand.Uint64()|1)
	return id
}

// On reports whether the request is sampled.
func (s *Span) On() bool { return s.tracer != nil }

// Remote reports whether the client named the parent.
func (s *Span) Remote() bool { return s.remote }

// Child is a part of a span, or of nothing if that is not sampled.
func (s *Span) Child() Span {
	if !s.On() {
		return Span{}
	}
	return Span{tracer: s.tracer, trace: s.trace, id: newID(), parent: s.id}
}

// Kinds of spans, with OTLP's numbers.
const (
	Internal = 1
	Server   = 2 // a request of a client
)

// Ended is what a span is told of when it is over. Nothing of it is kept.
type Ended struct {
	Name       string
	Kind       uint64
	From, To   time.Time
	Attributes []Attribute
	Encoded    []byte // more attributes, of [Encode]
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
	if s.On() {
		s.tracer.add(s.encode(e))
	}
}
