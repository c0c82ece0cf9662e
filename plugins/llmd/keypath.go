package llmd

import (
	"encoding/hex"

	"github.com/kvhost/kvhost/abi"
)

// appendUint appends a decimal number.
func appendUint(dst []byte, v uint32) []byte {
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

// appendKey appends a query's key in hexadecimal. It appends nothing if the key's length is not valid.
func appendKey(dst []byte, q *abi.PlaceQuery) []byte {
	if q.KeyLen > abi.KeyBytes {
		return dst
	}
	return hex.AppendEncode(dst, q.Key[:q.KeyLen])
}
