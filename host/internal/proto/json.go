package proto

import (
	"encoding/json"
	"strings"

	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// JSON is a message as scripts and pages want it: names as in the .proto file, every field there even when it is zero,
// whole numbers as numbers, and enumerations as words in lower case without their type's name. protojson writes 64-bit
// numbers as text and leaves the layout of its output open.
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
		return plainMessage(v.Message())
	case protoreflect.EnumKind:
		e := f.Enum().Values().ByNumber(v.Enum())
		if e == nil {
			return int32(v.Enum())
		}
		return enumWord(string(f.Enum().Name()), string(e.Name()))
	}
	return v.Interface()
}

// enumWord turns ROOT_STATE_IN_SERVICE of RootState into in_service.
func enumWord(enum, value string) string {
	var prefix strings.Builder
	for i, r := range enum {
		if i > 0 && r >= 'A' && r <= 'Z' {
			prefix.WriteByte('_')
		}
		prefix.WriteRune(r)
	}
	return strings.ToLower(strings.TrimPrefix(value, strings.ToUpper(prefix.String())+"_"))
}
