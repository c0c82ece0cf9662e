package trace

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/kvhost/kvhost/abi"
)

// Limits of the input.
const (
	MaxLine = 64 << 20 // bytes
	MaxIDs  = 1 << 20  // per request

	maxWindow = 128 << 20 // of a zstd frame
	readSize  = 256 << 10
)

// Request is one line of a trace.
type Request struct {
	Timestamp    int64 // milliseconds
	InputLength  int64 // tokens
	OutputLength int64
	HashIDs      []uint64 // one per block, chained
	Line         int      // where it stood, from 1

	// Optional hints of the engine about the request's end.
	EndReason abi.EndReason
	Priority  int32 // lower goes first
	ReturnMS  int64 // the prefix is expected to be used again after so many milliseconds; 0: unknown
}

// Hints returns what the engine would tell when the request ends.
func (r *Request) Hints() abi.Hints {
	bounded := func(n int64) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }
	return abi.Hints{
		Reason: r.EndReason, TokensIn: bounded(r.InputLength), TokensOut: bounded(r.OutputLength),
		Priority: r.Priority, ReturnMS: bounded(r.ReturnMS),
	}
}

// Reader reads the requests of a trace one by one. It is not safe for concurrent use.
type Reader struct {
	name   string
	format format
	fields columns // of CSV
	src    io.Reader
	close  []func() error
	packed bool
	buf    []byte
	lo, hi int
	line   int
	srcErr error // what the source said last, given once the buffer is used up
	err    error // final
}

// Open opens a trace file.
func Open(path string) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOpen, err)
	}
	r, err := NewReader(f, path)
	if err != nil {
		f.Close()
		return nil, err
	}
	r.close = append(r.close, f.Close)
	return r, nil
}

// NewReader reads a trace from src. name is for errors, and its extension says how requests are written.
func NewReader(src io.Reader, name string) (*Reader, error) {
	r := &Reader{name: name, format: formatOf(name), buf: make([]byte, readSize)}
	n, err := io.ReadFull(src, r.buf[:4])
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, fmt.Errorf("%w: %s: %w", ErrInput, name, err)
	}
	head := r.buf[:n]
	if r.format == oracleGeneral && !strings.HasSuffix(name, ".gz") && !strings.HasSuffix(name, ".zst") {
		head = nil // a record may begin as a compressed file does
	}
	whole := io.MultiReader(bytes.NewReader(bytes.Clone(r.buf[:n])), src)
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(whole)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrInput, name, err)
		}
		r.src, r.packed, r.close = z, true, []func() error{z.Close}
	case isZstd(head):
		z, err := zstd.NewReader(whole, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow),
			zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrInput, name, err)
		}
		r.src, r.packed, r.close = z, true, []func() error{func() error { z.Close(); return nil }}
	default:
		r.src = whole
	}
	return r, nil
}

// isZstd recognises frames and skippable frames.
func isZstd(head []byte) bool {
	return len(head) == 4 && (bytes.Equal(head, []byte{0x28, 0xb5, 0x2f, 0xfd}) ||
		head[0]&0xf0 == 0x50 && bytes.Equal(head[1:], []byte{0x2a, 0x4d, 0x18}))
}

// Close closes the file that Open opened.
func (r *Reader) Close() error {
	var first error
	for _, f := range r.close {
		if err := f(); err != nil && first == nil {
			first = err
		}
	}
	r.close = nil
	return first
}

// Next reads the next request into req, whose HashIDs are reused. It returns io.EOF at the end of the trace. After an
// error it returns the same error again.
func (r *Reader) Next(req *Request) error {
	for r.err == nil {
		*req = Request{HashIDs: req.HashIDs[:0]}
		if r.format == oracleGeneral {
			r.err = r.nextRecord(req)
		} else if line, err := r.readLine(); err != nil {
			r.err = err
		} else if len(bytes.TrimSpace(line)) == 0 {
			continue
		} else if err := r.parse(line, req); err == errHeader {
			continue
		} else if err != nil {
			r.err = fmt.Errorf("%s:%d: %w", r.name, r.line, err)
		}
		if r.err == nil {
			req.Line = r.line
			return nil
		}
	}
	return r.err
}

// parse parses a line of text.
func (r *Reader) parse(line []byte, req *Request) error {
	if r.format == jsonLines {
		return parse(line, req)
	}
	if r.fields == (columns{}) {
		var header bool
		if r.fields, header = headerOf(line); header {
			return errHeader
		}
	}
	return r.fields.parseCSV(line, req)
}

// readLine returns the next line without its line break. It is valid until the next call. A last line without a line
// break counts only when the input ended without an error: half a line can look complete.
func (r *Reader) readLine() ([]byte, error) {
	for searched := r.lo; ; {
		if i := bytes.IndexByte(r.buf[searched:r.hi], '\n'); i >= 0 {
			line := r.buf[r.lo : searched+i]
			r.lo = searched + i + 1
			r.line++
			return line, nil
		}
		if r.srcErr != nil {
			return r.lastLine()
		}
		if r.hi-r.lo > MaxLine {
			return nil, fmt.Errorf("%s:%d: %w: a line of more than %d bytes", r.name, r.line+1, ErrBounds, MaxLine)
		}
		searched = r.hi - r.lo
		r.fill()
	}
}

// fill moves what is not used yet to the start of the buffer, and reads more behind it.
func (r *Reader) fill() {
	if r.lo > 0 {
		copy(r.buf, r.buf[r.lo:r.hi])
		r.lo, r.hi = 0, r.hi-r.lo
	}
	if r.hi == len(r.buf) {
		r.buf = append(r.buf, make([]byte, len(r.buf))...)
	}
	n, err := r.src.Read(r.buf[r.hi:])
	r.hi += n
	r.srcErr = err
}

// sourceError is what the source said at its end, nil if that was the end and no error.
func (r *Reader) sourceError() error {
	if r.srcErr == io.EOF {
		return nil
	}
	what := "reading"
	if r.packed {
		what = "decompressing"
	}
	return fmt.Errorf("%s:%d: %w: %s: %w", r.name, r.line+1, ErrInput, what, r.srcErr)
}

func (r *Reader) lastLine() ([]byte, error) {
	if err := r.sourceError(); err != nil {
		return nil, err
	}
	if r.lo == r.hi {
		return nil, io.EOF
	}
	line := r.buf[r.lo:r.hi]
	r.lo = r.hi
	r.line++
	return line, nil
}

// ReadAll reads the rest of a trace. With an error it returns the requests before it.
func (r *Reader) ReadAll() ([]Request, error) {
	var all []Request
	var slab []uint64
	var req Request
	for {
		switch err := r.Next(&req); err {
		case nil:
		case io.EOF:
			return all, nil
		default:
			return all, err
		}
		n := len(req.HashIDs)
		if n > len(slab) {
			slab = make([]uint64, max(n, 64<<10))
		}
		copied := req
		copied.HashIDs = slab[:n:n]
		copy(copied.HashIDs, req.HashIDs)
		slab = slab[n:]
		all = append(all, copied)
	}
}
