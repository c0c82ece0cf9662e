package trace

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/kvhost/kvhost/abi"
)

// Writer writes a trace, one request per line.
type Writer struct {
	out  *bufio.Writer
	pack io.Closer // nil for plain text
	line []byte
}

// NewWriter writes to w: gzip when name ends in .gz, zstd when it ends in .zst, plain text otherwise.
func NewWriter(w io.Writer, name string) (*Writer, error) {
	t := &Writer{}
	switch {
	case strings.HasSuffix(name, ".gz"):
		z, err := gzip.NewWriterLevel(w, gzip.BestCompression)
		if err != nil {
			return nil, fmt.Errorf("trace: %w", err)
		}
		t.pack, w = z, z
	case strings.HasSuffix(name, ".zst"):
		z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedBestCompression))
		if err != nil {
			return nil, fmt.Errorf("trace: %w", err)
		}
		t.pack, w = z, z
	}
	t.out = bufio.NewWriterSize(w, 64<<10)
	return t, nil
}

// Write appends one request.
func (t *Writer) Write(req *Request) error {
	b := append(t.line[:0], `{"timestamp": `...)
	b = strconv.AppendInt(b, req.Timestamp, 10)
	b = append(b, `, "input_length": `...)
	b = strconv.AppendInt(b, req.InputLength, 10)
	b = append(b, `, "output_length": `...)
	b = strconv.AppendInt(b, req.OutputLength, 10)
	if req.EndReason != abi.EndUnknown {
		b = append(b, `, "end_reason": "`...)
		b = append(b, req.EndReason.String()...)
		b = append(b, '"')
	}
	if req.Priority != 0 {
		b = append(b, `, "priority": `...)
		b = strconv.AppendInt(b, int64(req.Priority), 10)
	}
	if req.ReturnMS != 0 {
		b = append(b, `, "return_ms": `...)
		b = strconv.AppendInt(b, req.ReturnMS, 10)
	}
	b = append(b, `, "hash_ids": [`...)
	for i, id := range req.HashIDs {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = strconv.AppendUint(b, id, 10)
	}
	t.line = append(b, "]}\n"...)
	_, err := t.out.Write(t.line)
	return err
}

// Close writes buffered data. It does not close the underlying writer.
func (t *Writer) Close() error {
	err := t.out.Flush()
	if t.pack != nil {
		if e := t.pack.Close(); err == nil {
			err = e
		}
	}
	return err
}
