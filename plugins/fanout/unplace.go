package fanout

import (
	"bytes"
	"encoding/hex"

	"github.com/kvhost/kvhost/abi"
)

// Unplace reads a path that Place gave, and no other: every digit must be as Place would write it.
func (p *Policy) Unplace(path []byte) abi.PathIdentity {
	if len(path) < namespaceDigits+1 || path[namespaceDigits] != '/' {
		return abi.PathIdentity{}
	}
	ns, ok := p.byName[dirName(path[:namespaceDigits])]
	if !ok {
		return abi.PathIdentity{}
	}
	rest := path[namespaceDigits+1:]
	var digits [maxDigits]byte
	at := 0
	for _, width := range p.widths {
		w := int(width)
		if len(rest) <= w || rest[w] != '/' {
			return abi.PathIdentity{}
		}
		at += copy(digits[at:], rest[:w])
		rest = rest[w+1:]
	}
	rest, ok = bytes.CutSuffix(rest, []byte(suffix))
	if !ok {
		return abi.PathIdentity{}
	}
	id := abi.PathIdentity{Known: 1, Namespace: ns}
	key, rest, ok := bytes.Cut(rest, []byte("_g"))
	if !ok || !bytes.HasPrefix(key, digits[:at]) || !parseKey(&id, key) {
		return abi.PathIdentity{}
	}
	group, rank, ok := bytes.Cut(rest, []byte("_r"))
	if !ok || !parseUint(&id.Group, group) || !parseUint(&id.Rank, rank) {
		return abi.PathIdentity{}
	}
	return id
}

func parseKey(id *abi.PathIdentity, text []byte) bool {
	if len(text) == 0 || len(text)%2 != 0 || len(text) > 2*abi.KeyBytes {
		return false
	}
	for _, c := range text {
		if c >= 'A' && c <= 'F' {
			return false // Place writes small letters
		}
	}
	n, err := hex.Decode(id.Key[:], text)
	id.KeyLen = uint32(n)
	return err == nil
}

func parseUint(dst *uint32, text []byte) bool {
	if len(text) == 0 || len(text) > 10 || (text[0] == '0' && len(text) > 1) {
		return false
	}
	var v uint64
	for _, c := range text {
		if c < '0' || c > '9' {
			return false
		}
		v = v*10 + uint64(c-'0')
	}
	*dst = uint32(v)
	return v < 1<<32
}
