package policy

import "fmt"

// pathChars are the bytes that a path component may hold.
var pathChars = func() (t [256]bool) {
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._=@+-") {
		t[c] = true
	}
	return t
}()

// CheckPath returns an error for a path that breaks the rules of the contract.
func CheckPath(path []byte) error {
	if what := pathError(path); what != "" {
		return fmt.Errorf("%w: it %s", ErrFault, what)
	}
	return nil
}

// pathError says how a path breaks the rules of the contract; it is empty for a legal path. The rules keep every path
// inside its root and legal on every file system we know of.
func pathError(path []byte) string {
	if len(path) == 0 {
		return "gave an empty path"
	}
	if len(path) > maxPathBytes {
		return fmt.Sprintf("gave a path of %d bytes, at most %d", len(path), maxPathBytes)
	}
	components, start := 1, 0
	for i, c := range path {
		if pathChars[c] && c != '.' {
			continue // nearly all of them
		}
		if c == '/' {
			if i == start || i-start > maxPathComponentSize {
				return fmt.Sprintf("gave the path %q: a component has 1 to %d bytes", path, maxPathComponentSize)
			}
			components++
			start = i + 1
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
