package proto

import (
	"encoding/binary"
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvhost/kvhost/host/kv"
)

// Protocol is the version of the protocol that client and host must have in common.
const Protocol = 1

// The descriptor socket is in the directory of the session socket. Each descriptor comes with a session's nonce and a tag.
const (
	DescriptorSuffix  = ".fd"
	NonceBytes        = 16
	DescriptorBytes   = NonceBytes + 8
	DescriptorMaxText = 1024 // bytes of an error text
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

// PackKeys packs keys of keyBytes each. Keys of full length are not copied: the result shares their memory, so the message must
// be encoded before the keys change.
func PackKeys(keys []kv.Key, keyBytes int) []byte {
	if keyBytes == kv.KeyBytes {
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(keys))), len(keys)*kv.KeyBytes)
	}
	packed := make([]byte, 0, keyBytes*len(keys))
	for i := range keys {
		packed = append(packed, keys[i][:keyBytes]...)
	}
	return packed
}

// ParseKeys unpacks keys of keyBytes each and appends them to dst. The all-zero key, which means "no parent", is
// refused.
func ParseKeys(dst []kv.Key, packed []byte, keyBytes int) ([]kv.Key, error) {
	if len(packed)%keyBytes != 0 {
		return dst, fmt.Errorf("%w: %d bytes are not a whole number of keys of %d", ErrMessage, len(packed), keyBytes)
	}
	at, n := len(dst), len(packed)/keyBytes
	dst = slices.Grow(dst, n)[:at+n]
	keys := dst[at:]
	for i := range keys {
		if keyBytes == kv.KeyBytes {
			keys[i] = kv.Key(packed[i*kv.KeyBytes:])
		} else {
			keys[i] = kv.Key{}
			copy(keys[i][:], packed[i*keyBytes:(i+1)*keyBytes])
		}
		if keys[i] == kv.Root {
			return dst[:at], fmt.Errorf("%w: key %d is all zero", ErrMessage, i)
		}
	}
	return dst, nil
}

// ParseKey reads one key, which must have keyBytes bytes and not be all zero.
func ParseKey(b []byte, keyBytes int) (kv.Key, error) {
	if len(b) != keyBytes {
		return kv.Key{}, fmt.Errorf("%w: key of %d bytes, want %d", ErrMessage, len(b), keyBytes)
	}
	k, err := kv.ParseKey(b)
	if err != nil {
		return k, fmt.Errorf("%w: %w", ErrMessage, err)
	}
	return k, nil
}
