package index

import "github.com/kvhost/kvhost/host/kv"

// Nearly every policy makes its names of the key's hexadecimal digits. A table keeps a name as a template in which runs of
// them are one byte each, which no path can hold: then the pieces of a namespace have a few directories in common, however
// many there are on the disk, and a file's name takes some bytes.
const (
	atCursor = 0x80 // | n-1: n digits of the key, from where the last run ended
	atFirst  = 0xc0 // | n-1: the first n digits
	mostRun  = 64
)

const digitText = "0123456789abcdef"

// digits are a key's, in lower case.
func digits(key *kv.Key) (d [2 * kv.KeyBytes]byte) {
	for i, b := range key {
		d[2*i], d[2*i+1] = digitText[b>>4], digitText[b&15]
	}
	return d
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' }

// appendTemplate appends the template of a part of a path. cursor is where the last run ended in the key's digits, and is
// returned for the next part. A single digit is part of a template only as a whole component: others are there by chance.
func appendTemplate(dst, path []byte, key *[2 * kv.KeyBytes]byte, cursor int) ([]byte, int) {
	for i := 0; i < len(path); {
		n := 0
		for i+n < len(path) && isDigit(path[i+n]) {
			n++
		}
		run := path[i : i+n]
		alone := (i == 0 || path[i-1] == '/') && (i+n == len(path) || path[i+n] == '/')
		switch {
		case n == 0:
			dst = append(dst, path[i])
			n = 1
		case n > mostRun || n == 1 && !alone:
			dst = append(dst, run...)
		case cursor+n <= len(key) && string(run) == string(key[cursor:cursor+n]):
			dst = append(dst, byte(atCursor|(n-1)))
			cursor += n
		case string(run) == string(key[:n]):
			dst = append(dst, byte(atFirst|(n-1)))
			cursor = n
		default:
			dst = append(dst, run...)
		}
		i += n
	}
	return dst, cursor
}

// expand appends what a template stands for.
func expand(dst, template []byte, key *kv.Key, cursor int) ([]byte, int) {
	for _, c := range template {
		if c < atCursor {
			dst = append(dst, c)
			continue
		}
		n := int(c&(mostRun-1)) + 1
		if c >= atFirst {
			cursor = 0
		}
		for range n {
			dst = append(dst, digitText[key[cursor/2]>>(4*(1-cursor%2))&15])
			cursor++
		}
	}
	return dst, cursor
}
