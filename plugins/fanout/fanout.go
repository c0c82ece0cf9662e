// Package fanout is the first-party place policy "fanout". Each namespace has a directory with hash directories below
// it, and each piece has a file.
//
//	<namespace>/<ab>/<c>/<key>_g<group>_r<rank>.kv
//
// The name of the namespace's directory is the first 32 hexadecimal digits of the SHA-256 of its text. ab and c are the
// first digits of the key. Keys are hashes, so pieces are spread evenly. The default of 4,096 directories per namespace
// keeps each directory small enough to read, and their number small enough to create. The file name contains the whole
// identity of the piece.
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

// Configuration keys.
const (
	ConfigWidths  = "widths" // number of hexadecimal digits for each directory level, for example "2/1"
	defaultWidths = "2/1"
)

const (
	namespaceDigits = 32
	maxLevels       = 4
	maxDigits       = 8 // most digits of all levels together
	suffix          = ".kv"
)

type dirName [namespaceDigits]byte

// Policy is a [guest.Placer] and a [guest.Namespacer].
type Policy struct {
	widths []uint8
	digits int // sum of widths
	names  []dirName
	known  []bool
}

// New parses the widths.
func New(info guest.Info) (*Policy, error) {
	p := &Policy{
		names: make([]dirName, info.MaxNamespaces),
		known: make([]bool, info.MaxNamespaces),
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

// Namespace sets the directory of a namespace.
func (p *Policy) Namespace(id uint32, text string) {
	if uint64(id) >= uint64(len(p.names)) {
		return
	}
	sum := sha256.Sum256([]byte(text))
	hex.Encode(p.names[id][:], sum[:namespaceDigits/2])
	p.known[id] = true
}

// longest is the buffer size for any path, including the bytes written behind its end.
const longest = 256

// Place appends the path. It appends nothing for an unknown namespace, or for a key of an invalid length.
func (p *Policy) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if uint64(q.Namespace) >= uint64(len(p.known)) || !p.known[q.Namespace] {
		return dst, abi.None
	}
	if q.KeyLen > abi.KeyBytes || int(q.KeyLen)*2 < p.digits || q.KeyLen == 0 {
		return dst, abi.None
	}
	at := len(dst)
	if cap(dst)-at >= longest { // always so in a guest's RESULT and in the host's buffers
		n := p.write(q, unsafe.Pointer(&dst[:at+1][at]))
		return dst[:at+n], abi.None
	}
	var b [longest]byte
	n := p.write(q, unsafe.Pointer(&b))
	return append(dst, b[:n]...), abi.None
}

// write writes a path to a buffer that has room for longest bytes, and returns its length. It writes eight bytes at a time,
// some of them behind the end of the path, and has no loop over the key. In a Go guest, a loop, an index check and a copy by
// the runtime would each cost more than this work. Numbers are little-endian in memory, as in every record.
func (p *Policy) write(q *abi.PlaceQuery, to unsafe.Pointer) int {
	dir, from := (*[namespaceDigits / 8]uint64)(to), (*[namespaceDigits / 8]uint64)(unsafe.Pointer(&p.names[q.Namespace]))
	dir[0], dir[1], dir[2], dir[3] = from[0], from[1], from[2], from[3]
	words := (*[abi.KeyBytes / 4]uint32)(unsafe.Pointer(&q.Key))
	first := spell(words[0]) // New makes sure that eight digits are enough
	n := uintptr(namespaceDigits)
	digits := first
	for _, w := range p.widths {
		*(*byte)(unsafe.Add(to, n)) = '/'
		*(*uint64)(unsafe.Add(to, n+1)) = digits
		n += 1 + uintptr(w)
		digits >>= 8 * w & 63
	}
	*(*byte)(unsafe.Add(to, n)) = '/'
	key := (*[abi.KeyBytes / 4]uint64)(unsafe.Add(to, n+1))
	key[0], key[1], key[2], key[3] = first, spell(words[1]), spell(words[2]), spell(words[3])
	if q.KeyLen > abi.KeyBytes/2 {
		key[4], key[5], key[6], key[7] = spell(words[4]), spell(words[5]), spell(words[6]), spell(words[7])
	}
	n += 1 + 2*uintptr(q.KeyLen)
	if q.Group < 10 && q.Rank < 10 {
		const tail = '_' | 'g'<<8 | '0'<<16 | '_'<<24 | 'r'<<32 | '0'<<40 | '.'<<48 | 'k'<<56
		*(*uint64)(unsafe.Add(to, n)) = tail + uint64(q.Group)<<16 + uint64(q.Rank)<<40
		*(*byte)(unsafe.Add(to, n+8)) = 'v'
		return int(n + 9)
	}
	b := (*[longest]byte)(to)
	b[uint8(n)], b[uint8(n+1)] = '_', 'g'
	m := putUint(b, uint8(n+2), q.Group)
	b[m], b[m+1] = '_', 'r'
	m = putUint(b, m+2, q.Rank)
	m += uint8(copy(b[m:], suffix))
	return int(m)
}

func putUint(b *[longest]byte, n uint8, v uint32) uint8 {
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

// spell returns the eight hexadecimal digits of four bytes. It converts all at once, because a loop over bytes would be most of
// the cost of a path in a Go guest. Both numbers are little-endian in memory, as in every record.
func spell(word uint32) uint64 {
	const every = 0x0101010101010101
	x := uint64(word)
	x = (x | x<<16) & 0x0000ffff0000ffff
	x = (x | x<<8) & 0x00ff00ff00ff00ff
	x = x>>4&(0x0f*every&0x00ff00ff00ff00ff) | x&(0x0f*every&0x00ff00ff00ff00ff)<<8
	letter := (x + 6*every) >> 4 & every
	return x + '0'*every + letter*('a'-'0'-10)
}
