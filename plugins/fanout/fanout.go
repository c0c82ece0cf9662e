// Package fanout is the first-party place policy "fanout": one directory per namespace, hash directories below it, one
// file per piece.
//
//	<namespace>/<ab>/<c>/<key>_g<group>_r<rank>.kv
//
// The namespace directory is the first 32 hexadecimal digits of the SHA-256 of the namespace's text; ab and c are the
// key's first digits. Keys are hashes, so pieces spread evenly; the default of 4,096 directories per namespace keeps
// each of them small enough to read and few enough to create. The name holds the whole identity, so that the inverse
// needs no table but the namespaces'.
package fanout

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// Config keys.
const (
	ConfigWidths  = "widths" // hexadecimal digits of each directory level, "2/1"
	defaultWidths = "2/1"
)

const (
	namespaceDigits = 32
	maxLevels       = 4
	maxDigits       = 8 // over all levels
	suffix          = ".kv"
)

type dirName [namespaceDigits]byte

// Policy is a [guest.Placer] and a [guest.Namespacer].
type Policy struct {
	widths []int
	digits int // sum of widths
	names  []dirName
	known  []bool
	byName map[dirName]uint32
}

// New reads the widths.
func New(info guest.Info) (*Policy, error) {
	p := &Policy{
		names:  make([]dirName, info.MaxNamespaces),
		known:  make([]bool, info.MaxNamespaces),
		byName: make(map[dirName]uint32),
	}
	text := info.Config.String(ConfigWidths, defaultWidths)
	for part := range strings.SplitSeq(text, "/") {
		if len(part) != 1 || part[0] < '1' || part[0] > '4' {
			return nil, fmt.Errorf("config %s = %q: want one to four levels of 1 to 4 digits, such as %q", ConfigWidths, text, defaultWidths)
		}
		p.widths = append(p.widths, int(part[0]-'0'))
		p.digits += int(part[0] - '0')
	}
	if len(p.widths) > maxLevels || p.digits > maxDigits {
		return nil, fmt.Errorf("config %s = %q: at most %d levels and %d digits in all", ConfigWidths, text, maxLevels, maxDigits)
	}
	return p, nil
}

// Namespace learns a namespace's directory.
func (p *Policy) Namespace(id uint32, text string) {
	if uint64(id) >= uint64(len(p.names)) {
		return
	}
	sum := sha256.Sum256([]byte(text))
	if p.known[id] {
		delete(p.byName, p.names[id])
	}
	hex.Encode(p.names[id][:], sum[:namespaceDigits/2])
	p.known[id] = true
	p.byName[p.names[id]] = id
}

// Place appends the path. It appends nothing for a namespace that it was not told, or for a key it cannot spell.
func (p *Policy) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if uint64(q.Namespace) >= uint64(len(p.known)) || !p.known[q.Namespace] {
		return dst, abi.None
	}
	if q.KeyLen > abi.KeyBytes || int(q.KeyLen)*2 < p.digits || q.KeyLen == 0 {
		return dst, abi.None
	}
	var key [2 * abi.KeyBytes]byte
	n := hex.Encode(key[:], q.Key[:q.KeyLen])
	dst = append(dst, p.names[q.Namespace][:]...)
	at := 0
	for _, w := range p.widths {
		dst = append(dst, '/')
		dst = append(dst, key[at:at+w]...)
		at += w
	}
	dst = append(dst, '/')
	dst = append(dst, key[:n]...)
	dst = append(dst, "_g"...)
	dst = appendUint(dst, q.Group)
	dst = append(dst, "_r"...)
	dst = appendUint(dst, q.Rank)
	return append(dst, suffix...), abi.None
}

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
