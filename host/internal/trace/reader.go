package trace

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/kvhost/kvhost/abi"
)

// Limits of the input.
const (
	MaxLine = 64 << 20 // bytes
	MaxIDs  = 1 << 20  // per request

	maxWindow = 128 << 20 // largest window of a zstd frame
	readSize  = 256 << 10
)

// Request is one line of a trace.
type Request struct {
	Timestamp    int64 // milliseconds
	InputLength  int64 // tokens
	OutputLength int64
	HashIDs      []uint64 // one per block, chained
	Line         int      // line number, from 1

	// Hints of the engine about the request's end. They are optional.
	EndReason abi.EndReason
	Priority  int32 // lower goes first
	ReturnMS  int64 // expected milliseconds until the prefix is used again; 0 means unknown
}

// Hints returns the hints that the engine would give when the request ends.
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
	src    *bufio.Reader
	close  []func() error
	packed bool
	long   []byte // a line longer than the buffer
	line   int
	err    error // the final error, which is returned again
}

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

// NewReader reads a trace from src. name is for errors.
func NewReader(src io.Reader, name string) (*Reader, error) {
	r := &Reader{name: name, src: bufio.NewReaderSize(src, readSize)}
	head, err := r.src.Peek(4)
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("%w: %s: %w", ErrInput, name, err)
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(r.src)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrInput, name, err)
		}
		r.unpack(z, z.Close)
	case isZstd(head):
		z, err := zstd.NewReader(r.src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow),
			zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrInput, name, err)
		}
		r.unpack(z, func() error { z.Close(); return nil })
	}
	return r, nil
}

// unpack continues with the output of a decompressor.
func (r *Reader) unpack(z io.Reader, end func() error) {
	r.src, r.packed, r.close = bufio.NewReaderSize(z, readSize), true, []func() error{end}
}

// isZstd reports whether the input begins with a frame or a skippable frame.
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

// Next reads the next request into req. It returns io.EOF at the end of the trace. After an error it returns the same error
// again.
func (r *Reader) Next(req *Request) error {
	for r.err == nil {
		*req = Request{}
		line, err := r.readLine()
		if err != nil {
			r.err = err
		} else if len(bytes.TrimSpace(line)) == 0 {
			continue
		} else if err := parse(line, req); err != nil {
			r.err = fmt.Errorf("%s:%d: %w", r.name, r.line, err)
		}
		if r.err == nil {
			req.Line = r.line
			return nil
		}
	}
	return r.err
}

var newline = []byte("\n")

// readLine returns the next line, without its line break. It is valid until the next call. A last line without a line
// break counts only when the input ended without an error: half a line can look complete.
func (r *Reader) readLine() ([]byte, error) {
	for r.long = r.long[:0]; ; {
		part, err := r.src.ReadSlice('\n')
		switch {
		case err == bufio.ErrBufferFull:
			if r.long = append(r.long, part...); len(r.long) > MaxLine {
				return nil, fmt.Errorf("%s:%d: %w: a line of more than %d bytes", r.name, r.line+1, ErrBounds, MaxLine)
			}
			continue
		case err == io.EOF && len(r.long)+len(part) == 0:
			return nil, io.EOF
		case err != nil && err != io.EOF:
			what := "reading"
			if r.packed {
				what = "decompressing"
			}
			return nil, fmt.Errorf("%s:%d: %w: %s: %w", r.name, r.line+1, ErrInput, what, err)
		}
		r.line++
		if len(r.long) == 0 {
			return bytes.TrimSuffix(part, newline), nil
		}
		r.long = append(r.long, part...)
		return bytes.TrimSuffix(r.long, newline), nil
	}
}
