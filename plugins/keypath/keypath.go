// Package keypath writes numbers and keys into paths and parses them strictly.
//
// The inverse of a place policy must accept exactly the paths that the policy produces, so a text is accepted only in its
// canonical form: lower-case hexadecimal digits, no leading zeros.
package keypath

import (
	"encoding/hex"

	"github.com/kvhost/kvhost/abi"
)

// AppendUint writes a decimal number.
func AppendUint(dst []byte, v uint32) []byte {
	if v < 10 {
		return append(dst, '0'+byte(v))
	}
	var b [10]byte
	i := len(b)
	for ; v > 0; v /= 10 {
		i--
		b[i] = '0' + byte(v%10)
	}
	return append(dst, b[i:]...)
}

// ParseUint reads what AppendUint wrote.
func ParseUint(text []byte) (v uint32, ok bool) {
	if len(text) == 0 || len(text) > 10 || text[0] == '0' && len(text) > 1 {
		return 0, false
	}
	var n uint64
	for _, c := range text {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return uint32(n), n < 1<<32
}

// AppendKey writes a query's key in hexadecimal. It appends nothing when the key's length is wrong.
func AppendKey(dst []byte, q *abi.PlaceQuery) []byte {
	if q.KeyLen > abi.KeyBytes {
		return dst
	}
	return hex.AppendEncode(dst, q.Key[:q.KeyLen])
}

// ParseKey reads what AppendKey wrote into id.
func ParseKey(id *abi.PathIdentity, text []byte) bool {
	if len(text) == 0 || len(text)%2 != 0 || len(text) > 2*abi.KeyBytes {
		return false
	}
	for _, c := range text {
		if c >= 'A' && c <= 'F' {
			return false
		}
	}
	n, err := hex.Decode(id.Key[:], text)
	id.KeyLen = uint32(n)
	return err == nil
}
