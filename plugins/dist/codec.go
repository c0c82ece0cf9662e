package dist

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/klauspost/compress/zstd"
)

const (
	// Suffix is the suffix of a compressed module's file name.
	Suffix = ".wasm.zst"
	// Base is the module that serves as the dictionary for the others. It contains the most of the Go runtime.
	Base = "fanout"
)

// errModule means that the bytes are not a compressed module, or that it was compressed with another base.
var errModule = errors.New("dist: not a compressed module, or its base was rebuilt since: run `make plugins`")

// maxModule is the maximum size of a decompressed module.
const maxModule = 64 << 20

// dictionary returns an identifier of a base, so that a module is not decompressed with another base. It avoids the
// lowest and the highest identifiers, which Zstandard reserves.
func dictionary(base []byte) uint32 {
	// The last section of the base is a digest of its inputs.
	sum := sha256.Sum256(base[len(base)-min(len(base), 4096):])
	return binary.LittleEndian.Uint32(sum[:])&0x3fffffff | 1<<16
}

// Encode compresses a module for embedding. Modules that were built by Go consist mostly of the Go runtime, which is nearly the
// same in each. So one module, the base, is compressed by itself (with a nil base). It then serves as the dictionary for all
// others, which shrink to a tenth instead of a quarter.
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

// hasBase reports whether a module was compressed with a base.
func hasBase(packed []byte) bool {
	var h zstd.Header
	return h.Decode(packed) == nil && h.DictionaryID != 0
}

// Decode decompresses a module that was compressed with this base. It verifies the frame's checksum.
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
