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

// JSON is a message as scripts and pages want it: names as in the .proto file, every field there even when it is zero,
// whole numbers as numbers, enumerations as words in lower case without their type's name, and durations and times (since
// 1970) in seconds. protojson writes 64-bit numbers as text and leaves the layout of its output open.
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

// Word is a value of an enumeration as JSON has it: in_service of ROOT_STATE_IN_SERVICE.
func Word(e protoreflect.Enum) string { return enumWord(e.Descriptor(), e.Number()) }

func enumWord(enum protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	value := enum.Values().ByNumber(n)
	if value == nil {
		return fmt.Sprint(n) // of a newer host
	}
	return strings.ToLower(strings.TrimPrefix(string(value.Name()), prefixOf(enum)))
}

// Value is the inverse of Word: the number of a word among the values of an enumeration, 0 if it is none.
func Value[E protoreflect.Enum](word string) E {
	var e E
	enum := e.Descriptor()
	if v := enum.Values().ByName(protoreflect.Name(prefixOf(enum) + strings.ToUpper(word))); v != nil {
		return e.Type().New(v.Number()).(E)
	}
	return e
}

// prefixOf is what the values of RootState begin with: ROOT_STATE_.
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
