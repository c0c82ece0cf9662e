package trace

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
)

// Hints are optional, and a bad one is refused by its name.
func TestHints(t *testing.T) {
	text := `{"timestamp": 1, "input_length": 10, "output_length": 2, "hash_ids": [1, 2]}
{"timestamp": 2, "input_length": 1099511627776, "output_length": 0, "end_reason": "tool_call", "priority": -5, "return_ms": 1500, "hash_ids": [3]}
`
	want := []Request{{}, {EndReason: abi.EndToolCall, Priority: -5, ReturnMS: 1500}}
	r, err := NewReader(strings.NewReader(text), "t.jsonl")
	testenv.OK(t, err)
	var got Request
	for i, q := range want {
		testenv.OK(t, r.Next(&got))
		if got.EndReason != q.EndReason || got.Priority != q.Priority || got.ReturnMS != q.ReturnMS {
			t.Errorf("request %d reads as %+v, want %+v", i, got, q)
		}
	}
	if h := got.Hints(); h != (abi.Hints{Reason: abi.EndToolCall, TokensIn: 1<<32 - 1, Priority: -5, ReturnMS: 1500}) {
		t.Errorf("the hints are %+v", h)
	}
	if err := r.Next(&got); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	line := `{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1], `
	for text, says := range map[string]string{
		`"priority": 1.5}`: "priority", `"priority": 3000000000}`: "priority", `"return_ms": -1}`: "return_ms",
		`"end_reason": 3}`: "end_reason",
	} {
		r, err := NewReader(strings.NewReader(line+text+"\n"), "bad")
		testenv.OK(t, err)
		if err := r.Next(&got); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), says) {
			t.Errorf("reading %s: got %v, want %v for %s", text, err, ErrFormat, says)
		}
	}
}
