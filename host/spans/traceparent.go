package spans

import "encoding/hex"

// parent is what a client says of the span that asks.
type parent struct {
	trace   [16]byte
	id      [8]byte
	sampled bool
}

// parse reads a W3C traceparent: version, trace, span and flags in lower-case hexadecimal. A version above 0 may have more
// fields behind these.
func parse(text string) (p parent, ok bool) {
	const length = 2 + 1 + 32 + 1 + 16 + 1 + 2
	if len(text) < length || text[2] != '-' || text[35] != '-' || text[52] != '-' {
		return parent{}, false
	}
	var version, flags [1]byte
	if !unhex(version[:], text[:2]) || !unhex(p.trace[:], text[3:35]) || !unhex(p.id[:], text[36:52]) || !unhex(flags[:], text[53:55]) {
		return parent{}, false
	}
	switch {
	case version[0] == 0xff, version[0] == 0 && len(text) > length, len(text) > length && text[length] != '-':
		return parent{}, false
	case p.trace == [16]byte{}, p.id == [8]byte{}:
		return parent{}, false
	}
	p.sampled = flags[0]&1 != 0
	return p, true
}

// unhex decodes lower-case digits only.
func unhex(dst []byte, text string) bool {
	for i := range len(text) {
		if c := text[i]; c >= 'A' && c <= 'F' {
			return false
		}
	}
	var src [32]byte
	n, err := hex.Decode(dst, src[:copy(src[:], text)])
	return err == nil && n == len(dst)
}
