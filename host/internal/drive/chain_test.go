package drive

import (
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

func TestKeysAreChained(t *testing.T) {
	a, b := ChainKeys(nil, []uint64{1, 2, 3, 4}), ChainKeys(nil, []uint64{1, 2, 9, 4})
	if a[0] != b[0] || a[1] != b[1] {
		t.Error("a shared prefix has other keys")
	}
	if a[2] == b[2] || a[3] == b[3] {
		t.Error("different prefixes share a key")
	}
	if a[0] == kv.Root {
		t.Error("a key is the root")
	}
}
