package policy

import "fmt"

// pathChars holds the bytes that a path component may contain.
var pathChars = func() (t [256]bool) {
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._=@+-") {
		t[c] = true
	}
	return t
}()

// plainChars is 1 for bytes of a path that need no further check.
var plainChars = func() (t [256]uint8) {
	for c, ok := range pathChars {
		if ok && c != '.' {
			t[c] = 1
		}
	}
	return t
}()

// plain returns a lower bound of the plain bytes at the start of a path. It tests eight at once, because this test is
// most of the time of naming a piece.
func plain(path []byte) (n int) {
	for ; len(path)-n >= 8; n += 8 {
		b := (*[8]byte)(path[n:])
		if plainChars[b[0]]&plainChars[b[1]]&plainChars[b[2]]&plainChars[b[3]]&
			plainChars[b[4]]&plainChars[b[5]]&plainChars[b[6]]&plainChars[b[7]] == 0 {
			break
		}
	}
	return n
}

// CheckPath returns an error for a path that breaks the rules of the contract.
func CheckPath(path []byte) error {
	if what := pathError(path); what != "" {
		return fmt.Errorf("%w: it %s", ErrFault, what)
	}
	return nil
}

// pathError describes how a path breaks the rules of the contract; it is empty for a legal path. The rules keep every
// path inside its root and legal on all known file systems.
func pathError(path []byte) string {
	if len(path) == 0 {
		return "gave an empty path"
	}
	if len(path) > MaxPath {
		return fmt.Sprintf("gave a path of %d bytes, at most %d", len(path), MaxPath)
	}
	components, start := 1, 0
	for i := plain(path); i < len(path); i++ {
		c := path[i]
		if plainChars[c] != 0 {
			continue
		}
		if c == '/' {
			if i == start || i-start > maxPathComponentSize {
				return fmt.Sprintf("gave the path %q: a component has 1 to %d bytes", path, maxPathComponentSize)
			}
			components++
			start = i + 1
			i += plain(path[start:])
			continue
		}
		if !pathChars[c] {
			return fmt.Sprintf("gave the path %q: byte %#02x is not one of [A-Za-z0-9._=@+-]", path, c)
		}
		if i == start {
			return fmt.Sprintf("gave the path %q: a component starts with a dot", path)
		}
	}
	if start == len(path) || len(path)-start > maxPathComponentSize {
		return fmt.Sprintf("gave the path %q: a component has 1 to %d bytes", path, maxPathComponentSize)
	}
	if components > maxPathComponents {
		return fmt.Sprintf("gave the path %q: %d components, at most %d", path, components, maxPathComponents)
	}
	return ""
}
