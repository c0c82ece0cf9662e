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
	"unsafe"

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
	widths []uint8
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
		p.widths = append(p.widths, part[0]-'0')
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
	var spelled [abi.KeyBytes / 4]uint64
	words := (*[abi.KeyBytes / 4]uint32)(unsafe.Pointer(&q.Key))
	for i := range (q.KeyLen + 3) / 4 {
		spelled[i%uint32(len(spelled))] = spell(words[i%uint32(len(words))])
	}
	key := (*[2 * abi.KeyBytes]byte)(unsafe.Pointer(&spelled))
	var b [256]byte // longer than any path of ours, so that a uint8 is always a valid index and costs no check
	*(*dirName)(b[:]) = p.names[q.Namespace]
	n, at := uint8(namespaceDigits), uint8(0)
	for _, w := range p.widths {
		b[n] = '/'
		n++
		for range w {
			b[n] = key[at%(2*abi.KeyBytes)]
			n++
			at++
		}
	}
	b[n] = '/'
	n++
	n += uint8(copy(b[n:], key[:2*q.KeyLen]))
	b[n], b[n+1] = '_', 'g'
	n = putUint(&b, n+2, q.Group)
	b[n], b[n+1] = '_', 'r'
	n = putUint(&b, n+2, q.Rank)
	n += uint8(copy(b[n:], suffix))
	return append(dst, b[:n]...), abi.None
}

func putUint(b *[256]byte, n uint8, v uint32) uint8 {
	if v < 10 {
		b[n] = '0' + byte(v)
		return n + 1
	}
	for p := v; p > 0; p /= 10 {
		n++
	}
	for at := n; v > 0; v /= 10 {
		at--
		b[at] = '0' + byte(v%10)
	}
	return n
}

// spell gives the eight hexadecimal digits of four bytes, all at once: a loop over bytes is most of what a path costs in
// a Go guest. Both numbers are little-endian in memory, as every record is.
func spell(word uint32) uint64 {
	const every = 0x0101010101010101
	x := uint64(word)
	x = (x | x<<16) & 0x0000ffff0000ffff
	x = (x | x<<8) & 0x00ff00ff00ff00ff
	x = x>>4&(0x0f*every&0x00ff00ff00ff00ff) | x&(0x0f*every&0x00ff00ff00ff00ff)<<8
	letter := (x + 6*every) >> 4 & every
	return x + '0'*every + letter*('a'-'0'-10)
}
