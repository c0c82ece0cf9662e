package observe

import (
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// figure is a number of a host. It is declared once and appears in two places: as a series of /metrics, and as a field or a
// counter of the status.
type figure struct {
	from   string // field of the statistics; a path for a field of an inner struct
	series string // name of the series without kvhost_; empty if there is none; a name that ends with _total is a counter, all others are gauges
	status string // name in the status; empty if it is not there
	help   string
}

// subject is a kind of thing with figures: roots, peers or policies.
type subject struct {
	figures []figure
	paths   [][]int
	series  []family
}

func of[T any](labels string, figures ...figure) *subject {
	s := &subject{figures: figures, paths: make([][]int, len(figures)), series: make([]family, len(figures))}
	for i, f := range figures {
		t := reflect.TypeFor[T]()
		for name := range strings.SplitSeq(f.from, ".") {
			if t.Kind() == reflect.Pointer {
				t = t.Elem()
			}
			field, found := t.FieldByName(name)
			if !found {
				panic("observe: no figure " + f.from + " in " + reflect.TypeFor[T]().String())
			}
			s.paths[i], t = append(s.paths[i], field.Index...), field.Type
		}
		if f.series != "" {
			s.series[i] = newFamily(f.series, f.help, labels)
		}
	}
	return s
}

// value returns a figure of one thing, given a pointer to its statistics. It returns false if an inner struct is missing.
func (s *subject) value(figure int, one any) (v reflect.Value, found bool) {
	v, err := reflect.ValueOf(one).Elem().FieldByIndexErr(s.paths[figure])
	return v, err == nil
}

// put sends the series of one thing.
func (s *subject) put(out series, one any, labels ...string) {
	for i, f := range s.figures {
		if f.series != "" {
			v, _ := s.value(i, one)
			out.put(s.series[i], number(v), labels...)
		}
	}
}

// fill sets the fields of a message of the status.
func (s *subject) fill(m protobuf.Message, one any) {
	to := m.ProtoReflect()
	for i, f := range s.figures {
		if v, found := s.value(i, one); found && f.status != "" {
			field := to.Descriptor().Fields().ByName(protoreflect.Name(f.status))
			to.Set(field, valueOf(field, v))
		}
	}
}

// count adds the figures of one thing to the counters of the status.
func (s *subject) count(into map[string]uint64, prefix string, one any) {
	for i, f := range s.figures {
		if v, found := s.value(i, one); found && f.status != "" {
			into[prefix+f.status] = whole(v)
		}
	}
}

// number returns a figure as a value of a series: a time in seconds, and 1 for true or for an error.
func number(v reflect.Value) float64 {
	if !v.IsValid() {
		return 0
	}
	if v.Kind() == reflect.Interface {
		return boolean(!v.IsNil())
	}
	switch x := v.Addr().Interface().(type) {
	case *time.Duration:
		return x.Seconds()
	case *time.Time:
		return float64(x.Unix())
	case *bool:
		return boolean(*x)
	case *float64:
		return *x
	}
	return float64(whole(v))
}

func whole(v reflect.Value) uint64 {
	switch {
	case v.CanInt():
		return uint64(v.Int())
	case v.CanUint():
		return v.Uint()
	}
	return v.Addr().Interface().(*atomic.Uint64).Load()
}

func valueOf(field protoreflect.FieldDescriptor, v reflect.Value) protoreflect.Value {
	switch x := v.Addr().Interface().(type) {
	case *time.Duration:
		return protoreflect.ValueOfMessage(durationpb.New(*x).ProtoReflect())
	case *time.Time:
		return protoreflect.ValueOfMessage(timestamppb.New(*x).ProtoReflect())
	case *bool:
		return protoreflect.ValueOfBool(*x)
	}
	if field.Kind() == protoreflect.Uint32Kind {
		return protoreflect.ValueOfUint32(uint32(whole(v)))
	}
	return protoreflect.ValueOfUint64(whole(v))
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
