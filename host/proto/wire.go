package proto

import (
	"encoding/binary"
	"fmt"

	"github.com/kvhost/kvhost/host/chunk"
)

// Protocol is the version that both ends must speak.
const Protocol = 1

// The descriptor socket stands beside the session socket and carries, per descriptor, a session's nonce and a tag.
const (
	DescriptorSuffix  = ".fd"
	NonceBytes        = 16
	DescriptorBytes   = NonceBytes + 8
	DescriptorMaxText = 1024 // most bytes of a refusal's text
)

// AppendDescriptor appends the message that accompanies a file descriptor.
func AppendDescriptor(dst, nonce []byte, tag uint64) []byte {
	dst = append(dst, nonce...)
	return binary.LittleEndian.AppendUint64(dst, tag)
}

// ParseDescriptor is the inverse of AppendDescriptor.
func ParseDescriptor(b []byte) (nonce [NonceBytes]byte, tag uint64, err error) {
	if len(b) != DescriptorBytes {
		return nonce, 0, fmt.Errorf("%w: descriptor message of %d bytes, want %d", ErrMessage, len(b), DescriptorBytes)
	}
	copy(nonce[:], b)
	return nonce, binary.LittleEndian.Uint64(b[NonceBytes:]), nil
}

// AppendKeys packs keys at keyBytes each.
func AppendKeys(dst []byte, keys []chunk.Key, keyBytes int) []byte {
	for i := range keys {
		dst = append(dst, keys[i][:keyBytes]...)
	}
	return dst
}

// ParseKeys unpacks keys of keyBytes each and appends them to dst. The all-zero key, which means "no parent", is refused.
func ParseKeys(dst []chunk.Key, packed []byte, keyBytes int) ([]chunk.Key, error) {
	if len(packed)%keyBytes != 0 {
		return dst, fmt.Errorf("%w: %d bytes are not a whole number of keys of %d", ErrMessage, len(packed), keyBytes)
	}
	for i := 0; len(packed) > 0; i++ {
		var k chunk.Key
		copy(k[:], packed[:keyBytes])
		if k == chunk.Root {
			return dst, fmt.Errorf("%w: key %d is all zero", ErrMessage, i)
		}
		dst = append(dst, k)
		packed = packed[keyBytes:]
	}
	return dst, nil
}

// ParseKey reads one key, which must have keyBytes bytes and not be all zero.
func ParseKey(b []byte, keyBytes int) (chunk.Key, error) {
	if len(b) != keyBytes {
		return chunk.Key{}, fmt.Errorf("%w: key of %d bytes, want %d", ErrMessage, len(b), keyBytes)
	}
	k, err := chunk.ParseKey(b)
	if err != nil {
		return k, fmt.Errorf("%w: %w", ErrMessage, err)
	}
	return k, nil
}
