// Package llmd is the place policy "llmd". It names files like llm-d and vLLM's file-system tier, so that their names can be
// read here and the names of kvhost look like theirs.
//
//	<model>_<digest>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin
//
// hhh and hh are the first three and the next two hexadecimal digits of the hash. In the model's name, slashes and all bytes
// that a path may not contain become underscores. The digest is the first 12 hexadecimal digits of a SHA-256. In vLLM it is
// that of a JSON text with the fields that must agree. A namespace with this text in its field "llmd.config" gets vLLM's
// digest. Any other namespace gets the digest of its own text. vLLM's text does not contain the model's revision, and that of a
// namespace does.
//
// Only the names are alike. Whether the contents are depends on the layout policy and on the file's header.
package llmd

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

const (
	fieldModel  = "model="
	fieldConfig = "extra.llmd.config=" // prefix of the field in the text of a namespace

	digestDigits = 12
	maxModel     = 200 // bytes; a component of a path can have 255
	minKey       = 3   // bytes; the directories need five digits
	suffix       = ".bin"
)

// Policy is a [guest.Placer] and a [guest.Namespacer].
type Policy struct {
	bases  []string // <model>_<digest> by namespace; empty if unknown
	byBase map[string]uint32
}

// New returns the policy, which has no settings.
func New(info guest.Info) (*Policy, error) {
	return &Policy{bases: make([]string, info.MaxNamespaces), byBase: make(map[string]uint32)}, nil
}

// Namespace sets the directory of a namespace. If two namespaces would have the same directory, the first gets it, and
// Place gives no answer for the other.
func (p *Policy) Namespace(id uint32, text string) {
	if uint64(id) >= uint64(len(p.bases)) {
		return
	}
	if old := p.bases[id]; old != "" {
		delete(p.byBase, old)
		p.bases[id] = ""
	}
	base := baseOf(text)
	if _, taken := p.byBase[base]; taken {
		return
	}
	p.bases[id] = base
	p.byBase[base] = id
}

func baseOf(text string) string {
	model, config := "", text
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if v, ok := strings.CutPrefix(line, fieldModel); ok {
			model = v
		}
		if v, ok := strings.CutPrefix(line, fieldConfig); ok {
			config = v
		}
	}
	sum := sha256.Sum256([]byte(config))
	return sanitize(model) + "_" + hex.EncodeToString(sum[:])[:digestDigits]
}

func sanitize(model string) string {
	b := []byte(model)
	if len(b) > maxModel {
		b = b[:maxModel]
	}
	for i, c := range b {
		if !plain(c) || c == '.' && i == 0 {
			b[i] = '_'
		}
	}
	return string(b)
}

// plain reports whether a component of a path may contain a byte.
func plain(c byte) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		return true
	}
	return strings.IndexByte("._=@+-", c) >= 0
}

// Place appends the path. It appends nothing for an unknown namespace, or for a key of an invalid length.
func (p *Policy) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if uint64(q.Namespace) >= uint64(len(p.bases)) || p.bases[q.Namespace] == "" || q.KeyLen < minKey || q.KeyLen > abi.KeyBytes {
		return dst, abi.None
	}
	var digits [2 * abi.KeyBytes]byte
	key := appendKey(digits[:0], q)
	dst = append(dst, p.bases[q.Namespace]...)
	dst = append(dst, "_r"...)
	dst = appendUint(dst, q.Rank)
	dst = append(dst, '/')
	dst = append(dst, key[:3]...)
	dst = append(dst, '/')
	dst = append(dst, key[3:5]...)
	dst = append(dst, "_g"...)
	dst = appendUint(dst, q.Group)
	dst = append(dst, '/')
	dst = append(dst, key...)
	return append(dst, suffix...), abi.None
}
