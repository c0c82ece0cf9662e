package trace

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"

	"github.com/kvhost/kvhost/abi"
)

// parse parses one JSON object. It is written by hand because a real trace has ten million ids, and encoding/json
// takes ten times as long.
func parse(line []byte, req *Request) error {
	p := parser{b: line}
	if err := p.object(req); err != nil {
		return err
	}
	if p.space(); p.i < len(p.b) {
		return p.bad("text after the object")
	}
	return nil
}

type parser struct {
	b []byte
	i int
}

func (p *parser) bad(what string) error {
	return fmt.Errorf("%w: column %d: %s", ErrFormat, p.i+1, what)
}

func (p *parser) space() {
	for p.i < len(p.b) && (p.b[p.i] == ' ' || p.b[p.i] == '\t' || p.b[p.i] == '\r' || p.b[p.i] == '\n') {
		p.i++
	}
}

func (p *parser) peek() byte {
	if p.i < len(p.b) {
		return p.b[p.i]
	}
	return 0
}

// take skips white space and the character c.
func (p *parser) take(c byte) bool {
	p.space()
	if p.peek() != c {
		return false
	}
	p.i++
	return true
}

const (
	sawTimestamp = 1 << iota
	sawInput
	sawOutput
	sawIDs
	sawReason
	sawPriority
	sawReturn
)

func (p *parser) object(req *Request) error {
	if !p.take('{') {
		return p.bad("want a JSON object")
	}
	seen := 0
	for first := true; ; first = false {
		if first && p.take('}') {
			break
		}
		key, err := p.key()
		if err != nil {
			return err
		}
		bit := 0
		switch string(key) {
		case "timestamp":
			bit = sawTimestamp
			req.Timestamp, err = p.rounded("timestamp")
		case "input_length":
			bit = sawInput
			req.InputLength, err = p.rounded("input_length")
		case "output_length":
			bit = sawOutput
			req.OutputLength, err = p.rounded("output_length")
		case "hash_ids":
			bit = sawIDs
			req.HashIDs, err = p.ids(req.HashIDs[:0])
		case "end_reason":
			bit = sawReason
			var text []byte
			if text, err = p.text(); err == nil {
				req.EndReason = abi.ParseEndReason(string(text))
			}
		case "priority":
			bit = sawPriority
			req.Priority, err = p.signed("priority")
		case "return_ms":
			bit = sawReturn
			req.ReturnMS, err = p.rounded("return_ms")
		default:
			err = p.ignored()
		}
		if err != nil {
			return err
		}
		if seen&bit != 0 {
			return p.bad(string(key) + " twice")
		}
		seen |= bit
		if p.take(',') {
			continue
		}
		if p.take('}') {
			break
		}
		return p.bad("want , or }")
	}
	for i, name := range [...]string{"timestamp", "input_length", "output_length", "hash_ids"} {
		if seen&(1<<i) == 0 {
			return p.bad("no " + name)
		}
	}
	return nil
}

// key reads a member's name and its colon.
func (p *parser) key() ([]byte, error) {
	p.space()
	key, err := p.text()
	if err != nil {
		return nil, err
	}
	if !p.take(':') {
		return nil, p.bad("want : after a key")
	}
	p.space()
	return key, nil
}

// text reads a string.
func (p *parser) text() ([]byte, error) {
	if p.peek() != '"' {
		return nil, p.bad("want a text in quotes")
	}
	start := p.i
	escaped := false
	for p.i++; ; p.i++ {
		if p.i >= len(p.b) {
			return nil, p.bad("the line ends within a key")
		}
		if p.b[p.i] == '\\' {
			escaped = true
			p.i++
			continue
		}
		if p.b[p.i] == '"' {
			break
		}
		if p.b[p.i] < 0x20 {
			return nil, p.bad("a control character within a key")
		}
	}
	p.i++
	key := p.b[start+1 : p.i-1]
	if escaped {
		var s string
		if err := json.Unmarshal(p.b[start:p.i], &s); err != nil {
			return nil, p.bad("a bad escape in a key")
		}
		key = []byte(s)
	}
	return key, nil
}

// ids reads the list of block ids.
func (p *parser) ids(dst []uint64) ([]uint64, error) {
	if p.peek() != '[' {
		return dst, p.bad("hash_ids is not a list")
	}
	p.i++
	if p.take(']') {
		return dst, nil
	}
	b := p.b
	for i := p.i; ; {
		for i < len(b) && (b[i] == ' ' || b[i] == '\t') {
			i++
		}
		start := i
		var n uint64
		for ; i < len(b) && b[i]-'0' <= 9; i++ {
			digit := uint64(b[i] - '0')
			if n > (math.MaxUint64-digit)/10 {
				p.i = start
				return dst, p.bad("a hash id above 2^64-1")
			}
			n = n*10 + digit
		}
		if p.i = start; i == start || (b[start] == '0' && i > start+1) {
			return dst, p.bad("a hash id is a whole number from 0")
		}
		if len(dst) == MaxIDs {
			return dst, fmt.Errorf("%w: more than %d hash ids", ErrBounds, MaxIDs)
		}
		dst = append(dst, n)
		if i < len(b) && b[i] == ',' {
			i++
			continue
		}
		p.i = i
		if p.take(',') {
			i = p.i
			continue
		}
		if p.take(']') {
			return dst, nil
		}
		return dst, p.bad("want , or ] after a hash id")
	}
}

// rounded parses a number of at least 0 and rounds it: some traces have fractions of milliseconds.
func (p *parser) rounded(name string) (int64, error) {
	start := p.i
	for p.i < len(p.b) && isNumber(p.b[p.i]) {
		p.i++
	}
	text := p.b[start:p.i]
	if !json.Valid(text) { // one number, or nothing
		p.i = start
		return 0, p.bad(name + " is not a number")
	}
	if n, err := strconv.ParseUint(string(text), 10, 53); err == nil {
		return int64(n), nil
	}
	f, err := strconv.ParseFloat(string(text), 64)
	if err != nil || !(f >= 0 && f < 1<<53) {
		p.i = start
		return 0, p.bad(name + " is out of range")
	}
	return int64(math.Round(f)), nil
}

// signed parses a whole number of 32 bits.
func (p *parser) signed(name string) (int32, error) {
	start := p.i
	for p.i < len(p.b) && isNumber(p.b[p.i]) {
		p.i++
	}
	n, err := strconv.ParseInt(string(p.b[start:p.i]), 10, 32)
	if err != nil {
		p.i = start
		return 0, p.bad(name + " is not a whole number of 32 bits")
	}
	return int32(n), nil
}

func isNumber(c byte) bool {
	return c-'0' <= 9 || c == '-' || c == '+' || c == '.' || c == 'e' || c == 'E'
}

// ignored skips a value of any type. It balances brackets and strings; encoding/json checks the rest.
func (p *parser) ignored() error {
	start, depth := p.i, 0
	for ; p.i < len(p.b); p.i++ {
		switch c := p.b[p.i]; {
		case c == '"':
			for p.i++; p.i < len(p.b) && p.b[p.i] != '"'; p.i++ {
				if p.b[p.i] == '\\' {
					p.i++
				}
			}
		case c == '[' || c == '{':
			depth++
			continue
		case depth > 0 && (c == ']' || c == '}'):
			depth--
		case depth == 0 && (c == ',' || c == '}'):
			return p.valid(start)
		default:
			continue
		}
		if depth == 0 {
			p.i++
			return p.valid(start)
		}
	}
	return p.valid(start)
}

func (p *parser) valid(start int) error {
	end := min(p.i, len(p.b))
	if !json.Valid(p.b[start:end]) {
		p.i = start
		return p.bad("not a JSON value")
	}
	p.i = end
	return nil
}
