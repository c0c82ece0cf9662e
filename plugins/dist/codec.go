package dist

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/klauspost/compress/zstd"
)

const (
	// Suffix is how the name of a compressed module ends.
	Suffix = ".wasm.zst"
	// Base is the module that is the dictionary of the others: the one that has the most of the runtime.
	Base = "fanout"
)

// errModule is returned for bytes that no module was compressed to, or that were compressed with another base.
var errModule = errors.New("dist: not a compressed module, or its base was rebuilt since: run `make plugins`")

// maxModule bounds what is decompressed.
const maxModule = 64 << 20

// dictionary names a base, so that a module is not decompressed with another one. Zstandard reserves the lowest and the
// highest identifiers.
func dictionary(base []byte) uint32 {
	// Its last section is the digest of all that it was built from
	sum := sha256.Sum256(base[len(base)-min(len(base), 4096):])
	return binary.LittleEndian.Uint32(sum[:])&0x3fffffff | 1<<16
}

// Encode compresses a module for embedding. Most of one that was built by Go is the Go runtime, which is nearly the same in
// each: so one module, the base, is compressed as it is (a nil base), and serves as the dictionary of all others, which
// shrink to a tenth instead of a quarter.
func Encode(module, base []byte) ([]byte, error) {
	options := []zstd.EOption{
		zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithWindowSize(8 << 20), zstd.WithEncoderConcurrency(1),
	}
	if base != nil {
		options = append(options, zstd.WithEncoderDictRaw(dictionary(base), base))
	}
	e, err := zstd.NewWriter(nil, options...)
	if err != nil {
		return nil, fmt.Errorf("dist: %w", err)
	}
	return e.EncodeAll(module, nil), nil
}

// hasBase says whether a module was compressed with a base.
func hasBase(packed []byte) bool {
	var h zstd.Header
	return h.Decode(packed) == nil && h.DictionaryID != 0
}

// Decode gives the module that was encoded with this base. The bytes are checked against the frame's checksum.
func Decode(packed, base []byte) ([]byte, error) {
	options := []zstd.DOption{zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxModule)}
	if base != nil {
		options = append(options, zstd.WithDecoderDictRaw(dictionary(base), base))
	}
	d, err := zstd.NewReader(nil, options...)
	if err != nil {
		return nil, fmt.Errorf("dist: %w", err)
	}
	defer d.Close()
	module, err := d.DecodeAll(packed, nil)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", errModule, err)
	}
	if len(module) == 0 {
		return nil, errModule
	}
	return module, nil
}
