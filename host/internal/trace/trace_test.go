package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
)

const three = `{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp":27.6,"input_length":1e3,"output_length":0,"hash_ids":[0,18446744073709551615],"type":"text","more":{"a":[1,"}]",null]}}

  {"hash\u005fids": [ ] , "output_length" :7, "input_length": 3, "timestamp": 9007199254740991}  ` + "\r\n"

var threeRequests = []Request{
	{Timestamp: 0, InputLength: 6758, OutputLength: 500, HashIDs: []uint64{0, 1, 2}, Line: 1},
	{Timestamp: 28, InputLength: 1000, OutputLength: 0, HashIDs: []uint64{0, math.MaxUint64}, Line: 2},
	{Timestamp: 1<<53 - 1, InputLength: 3, OutputLength: 7, HashIDs: []uint64{}, Line: 4},
}

// pack compresses by the extension of a name.
func pack(t testing.TB, name string, requests []Request) []byte {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser
	switch filepath.Ext(name) {
	case ".gz":
		w = gzip.NewWriter(&b)
	case ".zst":
		z, err := zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1))
		testenv.OK(t, err)
		w = z
	default:
		t.Fatalf("%s is of no kind that is compressed", name)
	}
	lines := json.NewEncoder(w)
	for _, r := range requests {
		line := map[string]any{"timestamp": r.Timestamp, "input_length": r.InputLength, "output_length": r.OutputLength, "hash_ids": r.HashIDs}
		testenv.OK(t, lines.Encode(line))
	}
	testenv.OK(t, w.Close())
	return b.Bytes()
}

func read(t testing.TB, data []byte) ([]Request, error) {
	t.Helper()
	r, err := NewReader(bytes.NewReader(data), "x")
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return rest(r)
}

// rest reads the rest of a trace, with an error the requests before it.
func rest(r *Reader) (all []Request, err error) {
	for {
		var req Request
		switch err := r.Next(&req); err {
		case nil:
			all = append(all, req)
		case io.EOF:
			return all, nil
		default:
			return all, err
		}
	}
}

func TestReadsPlainText(t *testing.T) {
	for _, text := range []string{three, strings.TrimRight(three, "\r\n")} {
		got, err := read(t, []byte(text))
		if err != nil || !reflect.DeepEqual(got, threeRequests) {
			t.Errorf("the requests are %+v (%v), want %+v", got, err, threeRequests)
		}
	}
	for _, text := range []string{"", "\n\n  \n"} {
		if got, err := read(t, []byte(text)); len(got) != 0 || err != nil {
			t.Errorf("empty: %v, %v", got, err)
		}
	}
}

// The compression of a file is recognised by its content, whatever its name.
func TestReadsCompressed(t *testing.T) {
	var want []Request
	for i := range 1000 {
		want = append(want, Request{Timestamp: int64(i), InputLength: 9, HashIDs: []uint64{uint64(i) * 0x9e3779b97f4a7c15}, Line: i + 1})
	}
	for _, kind := range []string{"x.jsonl.gz", "x.jsonl.zst"} {
		path := filepath.Join(t.TempDir(), "trace")
		testenv.OK(t, os.WriteFile(path, pack(t, kind, want), 0o600))
		r, err := Open(path)
		testenv.OK(t, err)
		got, err := rest(r)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %d requests, %v", kind, len(got), err)
		}
		if err := r.Next(&Request{}); err != io.EOF {
			t.Errorf("%s: after the end: %v", kind, err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("%s: close: %v", kind, err)
		}
	}
}

// A truncated compressed trace gives its complete requests, then an error, and never half a request.
func TestTruncated(t *testing.T) {
	var want []Request
	for i := range 5000 {
		want = append(want, Request{Timestamp: int64(i), HashIDs: []uint64{uint64(i) * 0x9e3779b97f4a7c15, uint64(i)},
			Line: i + 1})
	}
	for _, kind := range []string{"x.gz", "x.zst"} {
		data := pack(t, kind, want)
		for _, cut := range []int{5, len(data) / 3, len(data) / 2, len(data) - 9, len(data) - 1} {
			got, err := read(t, data[:cut])
			if !errors.Is(err, ErrInput) {
				t.Errorf("%s cut at %d of %d: error %v", kind, cut, len(data), err)
			}
			if len(got) > 0 && !reflect.DeepEqual(got, want[:len(got)]) {
				t.Errorf("%s cut at %d: the %d requests before are not those that were written", kind, cut, len(got))
			}
		}
		if got, _ := read(t, data[:len(data)-1]); len(got) < len(want)/2 {
			t.Errorf("%s: only %d of %d requests before the cut", kind, len(got), len(want))
		}
		data[len(data)/2] ^= 0x55
		if got, err := read(t, data); err == nil && reflect.DeepEqual(got, want) {
			t.Errorf("%s: damage was not noticed", kind)
		}
	}
	if _, err := read(t, []byte(three[:60])); !errors.Is(err, ErrFormat) {
		t.Errorf("plain text cut: %v", err)
	}
}

func TestErrorsNameFileAndLine(t *testing.T) {
	ok := `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}` + "\n"
	for _, test := range []struct{ line, want string }{
		{`[1]`, "array"},
		{`{}`, "no hash_ids"},
		{`{"timestamp":0,"hash_ids":[]}`, "no input_length"},
		{`{"timestamp":"0","input_length":1,"output_length":1,"hash_ids":[]}`, "timestamp"},
		{`{"timestamp":-1,"input_length":1,"output_length":1,"hash_ids":[]}`, "timestamp is out of range"},
		{`{"timestamp":0,"input_length":1e99,"output_length":1,"hash_ids":[]}`, "input_length is out of range"},
		{`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":5}`, "hash_ids"},
		{`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[-1]}`, "hash_ids"},
		{`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1.5]}`, "hash_ids"},
		{`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[18446744073709551616]}`, "hash_ids"},
		{`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]} x`, "after top-level value"},
		{`{"timestamp":0,"hash_ids":[1, 2`, "unexpected end"},
	} {
		got, err := read(t, []byte(ok+test.line+"\n"+ok))
		if !errors.Is(err, ErrFormat) || !strings.HasPrefix(err.Error(), "x:2: ") ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %q, want x:2 and %q", test.line, err, test.want)
		}
		if len(got) != 1 {
			t.Errorf("%s: %d requests before the error, want 1", test.line, len(got))
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, ErrOpen) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

// endless is a line that never ends.
type endless struct{ given int }

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	e.given += len(p)
	return len(p), nil
}

func TestBounds(t *testing.T) {
	src := &endless{}
	r, err := NewReader(src, "endless")
	testenv.OK(t, err)
	if err := r.Next(&Request{}); !errors.Is(err, ErrBounds) {
		t.Errorf("endless line: %v", err)
	}
	if src.given > 4*MaxLine {
		t.Errorf("read %d bytes of an endless line", src.given)
	}
	ids := strings.Repeat("1,", MaxIDs) + "1"
	if _,
		err := read(t,
		[]byte(`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[`+ids+`]}`)); !errors.Is(err, ErrBounds) {
		t.Errorf("too many ids: %v", err)
	}
}

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
