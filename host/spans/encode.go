package spans

import (
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Attribute is a fact of a span: a text, or whole numbers.
type Attribute struct {
	Key     string
	text    string
	number  int64
	numbers []int64
	kind    uint8
}

const (
	isText = iota
	isNumber
	isNumbers
)

// Text is an attribute. Long texts are cut.
func Text(key, value string) Attribute { return Attribute{Key: key, text: value} }

// Number is an attribute.
func Number[T ~int | ~int64 | ~uint32 | ~uint64](key string, value T) Attribute {
	return Attribute{Key: key, number: int64(value), kind: isNumber}
}

// Numbers is an attribute with a list.
func Numbers(key string, values []int64) Attribute {
	return Attribute{Key: key, numbers: values, kind: isNumbers}
}

// longestText bounds texts, of which clients and file systems choose some.
const longestText = 512

// Fields of OTLP's messages, version 1: opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.
const (
	keyValueKey, keyValueValue             = 1, 2
	valueText, valueInt, valueArray        = 1, 3, 5
	arrayValues                            = 1
	spanTrace, spanID, spanParent          = 1, 2, 4
	spanName, spanKind, spanStart, spanEnd = 5, 6, 7, 8
	spanAttributes, spanEvents, spanLinks  = 9, 11, 13
	spanStatus, spanFlags                  = 15, 16
	eventTime, eventName                   = 1, 2
	linkTrace, linkSpan, linkFlags         = 1, 2, 6
	statusMessage, statusCode, statusError = 2, 3, 2
	dataResource                           = 1
	resourceSpansResource, resourceScope   = 1, 2
	resourceAttributes                     = 1
	scopeSpansScope, scopeSpansSpan        = 1, 2
	scopeName, scopeVersion                = 1, 2
	flagSampled, flagHasRemote, flagRemote = 0x01, 0x100, 0x200
)

// part appends a message that is a field of another.
func part(b []byte, field protowire.Number, fill func([]byte) []byte) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	at := len(b)
	b = fill(append(b, 0, 0, 0)) // lengths up to 2 MiB, in a varint that is not the shortest
	n := len(b) - at - 3
	b[at], b[at+1], b[at+2] = byte(n)|0x80, byte(n>>7)|0x80, byte(n>>14)
	return b
}

func text(b []byte, field protowire.Number, s string) []byte {
	if len(s) > longestText {
		s = s[:longestText]
	}
	s = strings.ToValidUTF8(s, "\uFFFD") // no copy if it is valid
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}

func raw(b []byte, field protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), v)
}

func number(b []byte, field protowire.Number, n uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), n)
}

func moment(b []byte, field protowire.Number, t time.Time) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(b, field, protowire.Fixed64Type), uint64(t.UnixNano()))
}

func flags(b []byte, field protowire.Number, n uint32) []byte {
	return protowire.AppendFixed32(protowire.AppendTag(b, field, protowire.Fixed32Type), n)
}

// attribute appends a KeyValue.
func attribute(b []byte, field protowire.Number, a *Attribute) []byte {
	return part(b, field, func(b []byte) []byte {
		return part(text(b, keyValueKey, a.Key), keyValueValue, func(b []byte) []byte {
			switch a.kind {
			case isNumber:
				return number(b, valueInt, uint64(a.number))
			case isNumbers:
				return part(b, valueArray, func(b []byte) []byte {
					for _, n := range a.numbers {
						b = part(b, arrayValues, func(b []byte) []byte { return number(b, valueInt, uint64(n)) })
					}
					return b
				})
			}
			return text(b, valueText, a.text)
		})
	})
}

// Encode prepares attributes that many spans have.
func Encode(list ...Attribute) (b []byte) {
	for i := range list {
		b = attribute(b, spanAttributes, &list[i])
	}
	return b
}

// encode is the span as a message of OTLP.
func (s *Span) encode(e *Ended) []byte {
	b := make([]byte, 0, 512+len(e.Encoded))
	b = raw(b, spanTrace, s.trace[:])
	b = raw(b, spanID, s.id[:])
	f := uint32(flagSampled | flagHasRemote)
	if s.parent != [8]byte{} {
		b = raw(b, spanParent, s.parent[:])
	}
	if s.remote {
		f |= flagRemote
	}
	b = flags(b, spanFlags, f)
	b = text(b, spanName, e.Name)
	b = number(b, spanKind, e.Kind)
	b = moment(b, spanStart, e.From)
	b = moment(b, spanEnd, later(e.From, e.To))
	b = append(b, e.Encoded...)
	for i := range e.Attributes {
		b = attribute(b, spanAttributes, &e.Attributes[i])
	}
	for i := range e.Events {
		if at := e.Events[i].At; !at.IsZero() {
			b = part(b, spanEvents, func(b []byte) []byte {
				return text(moment(b, eventTime, at), eventName, e.Events[i].Name)
			})
		}
	}
	if l := e.Link; l != nil && l.On() {
		b = part(b, spanLinks, func(b []byte) []byte {
			return flags(raw(raw(b, linkTrace, l.trace[:]), linkSpan, l.id[:]), linkFlags, flagSampled|flagHasRemote)
		})
	}
	if e.Failure != "" {
		code := Text("error.type", e.Code)
		b = attribute(b, spanAttributes, &code)
		b = part(b, spanStatus, func(b []byte) []byte {
			return number(text(b, statusMessage, e.Failure), statusCode, statusError)
		})
	}
	return b
}

// later keeps a span from ending before it began when the clock was set back.
func later(from, to time.Time) time.Time {
	if to.Before(from) {
		return from
	}
	return to
}

// data is a TracesData with encoded spans, which has the same form as an ExportTraceServiceRequest. Lengths are not bounded
// here as those of [part] are.
func data(resource []Attribute, version string, spans [][]byte) []byte {
	var res, scope []byte
	for i := range resource {
		res = attribute(res, resourceAttributes, &resource[i])
	}
	scope = raw(scope, scopeSpansScope, text(text(nil, scopeName, "github.com/kvhost/kvhost"), scopeVersion, version))
	for _, s := range spans {
		scope = raw(scope, scopeSpansSpan, s)
	}
	return raw(nil, dataResource, raw(raw(nil, resourceSpansResource, res), resourceScope, scope))
}
