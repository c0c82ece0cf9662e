// Package llmd is the place policy "llmd": files are named as llm-d and vLLM's file-system tier name them, so that a
// directory of theirs can be read, and one of ours looks like theirs.
//
//	<model>_<digest>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin
//
// hhh and hh are the first three and the next two hexadecimal digits of the hash. Slashes in the model's name become
// underscores; so does every other byte that a path may not hold. The digest is the first 12 hexadecimal digits of a
// SHA-256: in vLLM of a JSON text of the fields that must agree. A namespace that carries this text, in its field
// "llmd.config", gets vLLM's own digest; any other gets that of the namespace's text. Theirs know nothing of the model's
// revision, ours does.
//
// Only names are alike: whether the bytes are is for the layout policy and the file's header to say.
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
	fieldConfig = "extra.llmd.config=" // as in the text of a namespace

	digestDigits = 12
	maxModel     = 200 // bytes: a path's component has 255
	minKey       = 3   // bytes: five digits make directories
	suffix       = ".bin"
)

// Policy is a [guest.Placer] and a [guest.Namespacer].
type Policy struct {
	bases  []string // by namespace: <model>_<digest>, empty when it is not known
	byBase map[string]uint32
}

// New makes the policy; it has no settings.
func New(info guest.Info) (*Policy, error) {
	return &Policy{bases: make([]string, info.MaxNamespaces), byBase: make(map[string]uint32)}, nil
}

// Namespace learns a namespace's directory. Of two namespaces with the same directory the first has it; for the other
// Place has no answer.
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

// plain are the bytes that a path's component may hold.
func plain(c byte) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		return true
	}
	return strings.IndexByte("._=@+-", c) >= 0
}

// Place appends the path. It appends nothing for a namespace that it was not told, or for a key it cannot spell.
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
