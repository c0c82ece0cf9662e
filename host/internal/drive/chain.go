package drive

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/kvhost/kvhost/host/kv"
)

// KeyBytes is the length of the keys that [ChainKeys] makes.
const KeyBytes = 16

// childKey returns the key of the chunk after parent. It is a hash of the whole prefix, because the parent's key is one.
func childKey(parent kv.Key, id uint64) kv.Key {
	var b [KeyBytes + 8]byte
	copy(b[:], parent[:KeyBytes])
	binary.LittleEndian.PutUint64(b[KeyBytes:], id)
	sum := xxh3.Hash128(b[:]).Bytes()
	var k kv.Key
	copy(k[:], sum[:])
	if k == kv.Root { // this key would mean "no parent"
		k[0] = 1
	}
	return k
}

// ChainKeys appends the keys of a request's chunks to dst, given the request's hash ids.
func ChainKeys(dst []kv.Key, ids []uint64) []kv.Key {
	parent := kv.Root
	for _, id := range ids {
		parent = childKey(parent, id)
		dst = append(dst, parent)
	}
	return dst
}
