package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// record is one of oracleGeneral.
func record(seconds uint32, object uint64) []byte {
	b := binary.LittleEndian.AppendUint32(nil, seconds)
	b = binary.LittleEndian.AppendUint64(b, object)
	b = binary.LittleEndian.AppendUint32(b, 4096)
	return binary.LittleEndian.AppendUint64(b, ^uint64(0)) // it is not used again
}

func readAs(t testing.TB, name string, data []byte) ([]Request, error) {
	t.Helper()
	r, err := NewReader(bytes.NewReader(data), name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return r.ReadAll()
}

func one(line int, milliseconds int64, object uint64) Request {
	return Request{Timestamp: milliseconds, HashIDs: []uint64{object}, Line: line}
}

func TestOracleGeneral(t *testing.T) {
	// The first record begins with the bytes by which gzip is known.
	data := bytes.Join([][]byte{record(0x8b1f, 7), record(0xffffffff, 1<<64-1), record(5, 7)}, nil)
	want := []Request{one(1, 0x8b1f*1000, 7), one(2, 0xffffffff*1000, 1<<64-1), one(3, 5000, 7)}
	dir := t.TempDir()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"w.oracleGeneral": data, "w.oracleGeneral.bin": data, "w.oracleGeneral.zst": z.EncodeAll(data, nil),
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.ReadAll()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		r.Close()
	}
	got, err := readAs(t, "w.oracleGeneral", data[:len(data)-1])
	if !errors.Is(err, ErrInput) || len(got) != 2 || !strings.HasPrefix(err.Error(), "w.oracleGeneral:3: ") {
		t.Errorf("cut: %d requests, %v", len(got), err)
	}
	if got, err := readAs(t, "w.oracleGeneral", nil); len(got) != 0 || err != nil {
		t.Errorf("empty: %v, %v", got, err)
	}
}

func TestCSV(t *testing.T) {
	for text, want := range map[string][]Request{
		"1,7\n2.5,18446744073709551615,4096\r\n\n3,7":         {one(1, 1000, 7), one(2, 2500, 1<<64-1), one(4, 3000, 7)},
		"obj_size,Key,\"timestamp\"\n1, \"x\" ,4\n2,x,5\n":    {one(2, 4000, objectID([]byte("x"))), one(3, 5000, objectID([]byte("x")))},
		"\n id \n12\n\"12\"\n":                                {one(3, 0, 12), one(4, 0, 12)},
		"clock_time,obj_id,obj_size,next\n0,0,1,-1\n0,-1,1,2": {one(2, 0, 0), one(3, 0, objectID([]byte("-1")))},
		"":            nil,
		"id,time\n":   nil,
		"\r\n,\r\n":   nil,
		"1e3,\"a\"\n": {one(1, 1e6, objectID([]byte("a")))},
	} {
		got, err := readAs(t, "x.csv", []byte(text))
		if text == "\r\n,\r\n" {
			if !errors.Is(err, ErrFormat) {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for text, says := range map[string]string{
		"1,7\n2\n":      "x.csv.gz:2: trace: not a request: 1 columns, want 2",
		"1,7\nx,7\n":    `column 1: "x" is not a time`,
		"1,7\n-1,7\n":   "is not a time",
		"1,7\nNaN,7\n":  "is not a time",
		"1,7\n1e99,7\n": "is not a time",
		"1,7\n1,\n":     "column 2: no object",
		"1,7\n1,a\"b\n": "column 2: a quote",
		"id,time\n7\n":  "1 columns, want 2",
		"size,id\n7\n":  "1 columns, want 2",
	} {
		if _, err := readAs(t, "x.csv.gz", []byte(text)); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// Every whole record is a request, and nothing else is.
func FuzzOracleGeneral(f *testing.F) {
	f.Add(record(1, 2))
	f.Add(bytes.Join([][]byte{record(0x8b1f, 7), record(9, 9)}, nil)[:40])
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := readAs(t, "w.oracleGeneral", data)
		if (err == nil) != (len(data)%oracleRecord == 0) || len(got) != len(data)/oracleRecord {
			t.Fatalf("%d bytes: %d requests, %v", len(data), len(got), err)
		}
		for i, r := range got {
			if len(r.HashIDs) != 1 ||
				!bytes.Equal(record(uint32(r.Timestamp/1000), r.HashIDs[0])[:12], data[i*oracleRecord:][:12]) {
				t.Fatalf("record %d: %+v", i, r)
			}
		}
	})
}

// Every request has one chunk and a time, and stands in a line of its own; what is refused is named.
func FuzzCSV(f *testing.F) {
	f.Add([]byte("1,7\n2.5,18446744073709551615,4096\r\n\n3,7"))
	f.Add([]byte("obj_size,Key,\"timestamp\"\n1, \"x\" ,4\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := readAs(t, "x.csv", data)
		if err != nil && !errors.Is(err, ErrFormat) && !errors.Is(err, ErrInput) {
			t.Fatalf("%v", err)
		}
		line := 0
		for _, r := range got {
			if len(r.HashIDs) != 1 || r.Timestamp < 0 || r.Line <= line {
				t.Fatalf("%+v after line %d", r, line)
			}
			line = r.Line
		}
	})
}
