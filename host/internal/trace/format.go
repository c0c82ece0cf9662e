package trace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"path/filepath"
	"strconv"
	"strings"
)

// format is how requests are written.
type format uint8

const (
	jsonLines format = iota
	csvLines
	oracleGeneral
)

// formatOf follows from a file's name without the extension of its compression: the content does not tell.
func formatOf(name string) format {
	name = filepath.Base(name)
	for _, packed := range []string{".zst", ".gz"} {
		name = strings.TrimSuffix(name, packed)
	}
	switch {
	case strings.HasSuffix(name, ".csv"):
		return csvLines
	case strings.Contains(name, "oracleGeneral"):
		return oracleGeneral
	}
	return jsonLines
}

// oracleRecord is the size of a record of oracleGeneral: seconds (u32), object (u64), bytes (u32), and the number of
// the access that uses the object next (i64). They are little-endian and packed. Sizes and the future are ignored.
const oracleRecord = 24

// nextRecord reads a record of oracleGeneral: a request of one chunk. Line is its number.
func (r *Reader) nextRecord(req *Request) error {
	for r.hi-r.lo < oracleRecord {
		if r.srcErr != nil {
			if err := r.sourceError(); err != nil {
				return err
			}
			if r.lo == r.hi {
				return io.EOF
			}
			return fmt.Errorf("%s:%d: %w: %d bytes of a record of %d", r.name, r.line+1, ErrInput, r.hi-r.lo, oracleRecord)
		}
		r.fill()
	}
	b := r.buf[r.lo : r.lo+oracleRecord]
	r.lo += oracleRecord
	r.line++
	req.Timestamp = int64(binary.LittleEndian.Uint32(b)) * 1000
	req.HashIDs = append(req.HashIDs, binary.LittleEndian.Uint64(b[4:]))
	return nil
}

// columns says where a line of CSV has its time and its object, counted from 0.
type columns struct {
	time, id int // time is -1 when there is none
}

// names of columns in a header, in small letters.
var (
	timeNames = []string{"time", "timestamp", "clock_time", "real_time", "ts"}
	idNames   = []string{"id", "obj_id", "object_id", "objid", "object", "key", "obj"}
)

// headerOf reads the first line of a CSV file. It is a header if a field is the name of an object's column. Otherwise
// time and object are the first two fields.
func headerOf(line []byte) (c columns, header bool) {
	c = columns{time: -1, id: -1}
	for i, f := range bytes.Split(line, []byte{','}) {
		name := strings.ToLower(string(unquoted(f)))
		for _, n := range timeNames {
			if name == n && c.time < 0 {
				c.time = i
			}
		}
		for _, n := range idNames {
			if name == n && c.id < 0 {
				c.id = i
			}
		}
	}
	if c.id < 0 {
		return columns{time: 0, id: 1}, false
	}
	return c, true
}

func unquoted(field []byte) []byte {
	field = bytes.TrimSpace(field)
	if n := len(field); n >= 2 && field[0] == '"' && field[n-1] == '"' {
		return field[1 : n-1]
	}
	return field
}

// parseCSV parses a line: a request of one chunk. Objects that are no numbers of 64 bits get one by their name.
func (c columns) parseCSV(line []byte, req *Request) error {
	at, sawID := 0, false
	for rest, more := line, true; more; at++ {
		var field []byte
		field, rest, more = bytes.Cut(rest, []byte{','})
		if at != c.time && at != c.id {
			continue
		}
		text := unquoted(field)
		if bytes.IndexByte(text, '"') >= 0 {
			return fmt.Errorf("%w: column %d: a quote within a field", ErrFormat, at+1)
		}
		if at == c.id {
			if len(text) == 0 {
				return fmt.Errorf("%w: column %d: no object", ErrFormat, at+1)
			}
			req.HashIDs, sawID = append(req.HashIDs, objectID(text)), true
			continue
		}
		seconds, err := strconv.ParseFloat(string(text), 64)
		if err != nil || !(seconds >= 0 && seconds*1000 < 1<<53) {
			return fmt.Errorf("%w: column %d: %q is not a time in seconds", ErrFormat, at+1, text)
		}
		req.Timestamp = int64(math.Round(seconds * 1000))
	}
	if !sawID || at <= c.time {
		return fmt.Errorf("%w: %d columns, want %d", ErrFormat, at, max(c.time, c.id)+1)
	}
	return nil
}

func objectID(text []byte) uint64 {
	if n, err := strconv.ParseUint(string(text), 10, 64); err == nil {
		return n
	}
	h := fnv.New64a()
	h.Write(text)
	return h.Sum64()
}
