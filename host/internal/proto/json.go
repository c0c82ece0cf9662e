package proto

import (
	"encoding/json"
	"fmt"
	"strings"

	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// JSON encodes a message for scripts and pages. Names are those of the .proto file, and fields that are zero are included.
// Whole numbers are numbers, enumerations are words in lower case without the name of their type, and durations and times
// (since 1970) are in seconds. protojson would write 64-bit numbers as text, and does not guarantee its layout.
func JSON(m protobuf.Message) ([]byte, error) { return json.Marshal(plainMessage(m.ProtoReflect())) }

func plainMessage(m protoreflect.Message) any {
	out := map[string]any{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.HasPresence() && !m.Has(f) {
			continue
		}
		out[string(f.Name())] = plainField(f, m.Get(f))
	}
	return out
}

func plainField(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch {
	case f.IsList():
		l := v.List()
		out := make([]any, l.Len())
		for i := range out {
			out[i] = plainValue(f, l.Get(i))
		}
		return out
	case f.IsMap():
		out := map[string]any{}
		v.Map().Range(func(k protoreflect.MapKey, e protoreflect.Value) bool {
			out[k.String()] = plainValue(f.MapValue(), e)
			return true
		})
		return out
	}
	return plainValue(f, v)
}

func plainValue(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.MessageKind:
		switch m := v.Message().Interface().(type) {
		case *durationpb.Duration:
			return m.AsDuration().Seconds()
		case *timestamppb.Timestamp:
			return float64(m.AsTime().UnixMilli()) / 1e3
		}
		return plainMessage(v.Message())
	case protoreflect.EnumKind:
		if f.Enum().Values().ByNumber(v.Enum()) == nil {
			return int32(v.Enum())
		}
		return enumWord(f.Enum(), v.Enum())
	}
	return v.Interface()
}

// Word returns the JSON form of a value of an enumeration: in_service for ROOT_STATE_IN_SERVICE.
func Word(e protoreflect.Enum) string { return enumWord(e.Descriptor(), e.Number()) }

func enumWord(enum protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	value := enum.Values().ByNumber(n)
	if value == nil {
		return fmt.Sprint(n) // a value that only newer hosts know
	}
	return strings.ToLower(strings.TrimPrefix(string(value.Name()), prefixOf(enum)))
}

// Value is the inverse of Word. It returns 0 for a word that is no value of the enumeration.
func Value[E protoreflect.Enum](word string) E {
	var e E
	enum := e.Descriptor()
	if v := enum.Values().ByName(protoreflect.Name(prefixOf(enum) + strings.ToUpper(word))); v != nil {
		return e.Type().New(v.Number()).(E)
	}
	return e
}

// prefixOf returns the common prefix of the values of an enumeration: ROOT_STATE_ for RootState.
func prefixOf(enum protoreflect.EnumDescriptor) string {
	var b strings.Builder
	for i, r := range enum.Name() {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String()) + "_"
}
