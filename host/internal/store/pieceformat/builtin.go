package pieceformat

import (
	"bytes"
	"encoding/hex"
	"strconv"

	"github.com/kvhost/kvhost/host/kv"
)

// The built-in name is <namespace digest>/<aa>/<b>/<key>_g<group>_r<rank>.kv: aa and b are the first digits of the key. It
// is what the place policy fanout answers without settings.
const (
	digestDigits = 2 * len(kv.Digest{})
	fanDigits    = len("/aa/b/")
	suffix       = ".kv"
)

// AppendBuiltin appends the built-in name of a piece. keyLen is the length of its namespace's keys in bytes.
func AppendBuiltin(dst []byte, namespace kv.Digest, keyLen uint32, key *kv.Key, group, rank uint32) []byte {
	const digits = "0123456789abcdef"
	dst = hex.AppendEncode(dst, namespace[:])
	dst = append(dst, '/', digits[key[0]>>4], digits[key[0]&15], '/', digits[key[1]>>4], '/')
	dst = hex.AppendEncode(dst, key[:keyLen])
	dst = append(dst, "_g"...)
	dst = strconv.AppendUint(dst, uint64(group), 10)
	dst = append(dst, "_r"...)
	dst = strconv.AppendUint(dst, uint64(rank), 10)
	return append(dst, suffix...)
}

// Reserved says whether no policy may give a path, because a piece with its built-in name could not stand beside it: it is
// the built-in name of a piece, leads through one, or is a directory on the way to some. Of a piece's own built-in name it
// says so, too.
func Reserved(path []byte) bool {
	var parts [4][]byte
	n := 0
	for rest, more := path, true; more && n < len(parts); n++ {
		parts[n], rest, more = bytes.Cut(rest, []byte("/"))
	}
	for i, digits := range [...]int{digestDigits, 2, 1} {
		if len(parts[i]) != digits || len(bytes.Trim(parts[i], "0123456789abcdef")) > 0 {
			return false
		}
		if n == i+1 {
			return true
		}
	}
	return IsBuiltin(path[:digestDigits+fanDigits+len(parts[3])])
}

// IsBuiltin says whether a path is the built-in name of some piece, whatever stands under it.
func IsBuiltin(path []byte) bool {
	var namespace kv.Digest
	var key kv.Key
	if len(path) < digestDigits+fanDigits {
		return false
	}
	if _, err := hex.Decode(namespace[:], path[:digestDigits]); err != nil {
		return false
	}
	rest, ok := bytes.CutSuffix(path[digestDigits+fanDigits:], []byte(suffix))
	text, rest, found := bytes.Cut(rest, []byte("_g"))
	group, rank, both := bytes.Cut(rest, []byte("_r"))
	if !ok || !found || !both || len(text) == 0 || len(text) > 2*kv.KeyBytes || len(text)%2 != 0 {
		return false
	}
	n, err := hex.Decode(key[:], text)
	g, gerr := strconv.ParseUint(string(group), 10, 32)
	r, rerr := strconv.ParseUint(string(rank), 10, 32)
	if err != nil || gerr != nil || rerr != nil {
		return false
	}
	// Only the one spelling that AppendBuiltin has.
	return bytes.Equal(path, AppendBuiltin(nil, namespace, uint32(n), &key, uint32(g), uint32(r)))
}

// KeyLen is the length of a namespace's keys in bytes, by the namespace's text.
func KeyLen(text string) uint32 {
	if n, err := strconv.Atoi(kv.Field(text, "key_bytes")); err == nil && n > 0 && n <= kv.KeyBytes {
		return uint32(n)
	}
	return kv.KeyBytes
}
