package abi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// wasmHeader begins every core module: the magic and binary version 1.
var wasmHeader = []byte("\x00asm\x01\x00\x00\x00")

// errModule is what a reader of sections says of bytes that have none.
var errModule = errors.New("abi: not a core WebAssembly module")

// CustomSection gives the content of the first custom section of that name, and false when the module has none.
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

// WithCustomSection gives the module with one custom section of that name, at its end, in place of any that it had.
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

// eachSection calls f with each section, whole, and a custom one's name and content.
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

// sized reads bytes that follow their length, and says how many both take.
func sized(b []byte) (content []byte, n int, ok bool) {
	size, k := binary.Uvarint(b)
	if k <= 0 || k > 5 || size > uint64(len(b)-k) {
		return nil, 0, false
	}
	return b[k : k+int(size)], k + int(size), true
}
