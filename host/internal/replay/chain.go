package replay

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/kvhost/kvhost/host/kv"
)

// keyBytes is the length of a replay's keys.
const keyBytes = 16

// childKey is the key of the chunk that follows parent: a hash of the whole prefix, since the parent's key is one.
func childKey(parent kv.Key, id uint64) kv.Key {
	var b [keyBytes + 8]byte
	copy(b[:], parent[:keyBytes])
	binary.LittleEndian.PutUint64(b[keyBytes:], id)
	sum := xxh3.Hash128(b[:]).Bytes()
	var k kv.Key
	copy(k[:], sum[:])
	if k == kv.Root { // would mean "no parent"
		k[0] = 1
	}
	return k
}

// ChainKeys appends the keys of a request's chunks, from its hash ids, to dst.
func ChainKeys(dst []kv.Key, ids []uint64) []kv.Key {
	parent := kv.Root
	for _, id := range ids {
		parent = childKey(parent, id)
		dst = append(dst, parent)
	}
	return dst
}
