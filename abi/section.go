package abi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// wasmHeader is the beginning of every core module: the magic and binary version 1.
var wasmHeader = []byte("\x00asm\x01\x00\x00\x00")

// errModule means that the bytes are not a module.
var errModule = errors.New("abi: not a core WebAssembly module")

// CustomSection returns the content of the first custom section with a name. It returns false if the module has none.
func CustomSection(module []byte, name string) ([]byte, bool, error) {
	var found []byte
	ok := false
	err := eachSection(module, func(_ []byte, custom string, data []byte) {
		if custom == name && !ok {
			found, ok = data, true
		}
	})
	return found, ok, err
}

// WithCustomSection returns the module with one custom section of a name at its end, which replaces any earlier ones.
func WithCustomSection(module []byte, name string, data []byte) ([]byte, error) {
	out := slices.Clone(wasmHeader)
	err := eachSection(module, func(section []byte, custom string, _ []byte) {
		if custom != name {
			out = append(out, section...)
		}
	})
	if err != nil {
		return nil, err
	}
	body := append(binary.AppendUvarint(nil, uint64(len(name))), name...)
	body = append(body, data...)
	out = binary.AppendUvarint(append(out, 0), uint64(len(body)))
	return append(out, body...), nil
}

// eachSection calls f for each whole section, with the name and the content of a custom one.
func eachSection(module []byte, f func(section []byte, custom string, data []byte)) error {
	rest, ok := bytes.CutPrefix(module, wasmHeader)
	if !ok {
		return fmt.Errorf("%w: it begins with % x", errModule, module[:min(len(module), len(wasmHeader))])
	}
	for len(rest) > 0 {
		body, n, ok := sized(rest[1:])
		if !ok {
			return fmt.Errorf("%w: cut off in the section at byte %d", errModule, len(module)-len(rest))
		}
		name, data := "", []byte(nil)
		if rest[0] == 0 {
			text, m, ok := sized(body)
			if !ok {
				return fmt.Errorf("%w: a custom section at byte %d has no name", errModule, len(module)-len(rest))
			}
			name, data = string(text), body[m:]
		}
		f(rest[:1+n], name, data)
		rest = rest[1+n:]
	}
	return nil
}

// sized reads bytes that follow their length. n is the number of bytes of both.
func sized(b []byte) (content []byte, n int, ok bool) {
	size, k := binary.Uvarint(b)
	if k <= 0 || k > 5 || size > uint64(len(b)-k) {
		return nil, 0, false
	}
	return b[k : k+int(size)], k + int(size), true
}
