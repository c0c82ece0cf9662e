package llmd

import (
	"crypto/sha256"
	"encoding/hex"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
)

const (
	plainText  = "dtype=bf16\nmodel=meta-llama/Llama-3.1-8B\nrevision=main\n"
	vllmFields = `{"blocks_per_file":16,"dcp_size":1,"dtype":"bfloat16","inference_engine":"vllm","model_name":"meta-llama/Llama-3.1-8B"}`
	vllmText   = "dtype=bf16\nextra.llmd.config=" + vllmFields + "\nmodel=meta-llama/Llama-3.1-8B\n"
)

func newPolicy(t testing.TB) *Policy {
	t.Helper()
	p, err := New(guest.Info{MaxNamespaces: 8})
	testenv.OK(t, err)
	p.Namespace(1, plainText)
	p.Namespace(2, vllmText)
	return p
}

func query(ns uint32, key string, group, rank uint32) *abi.PlaceQuery {
	q := &abi.PlaceQuery{Namespace: ns, Group: group, Rank: rank}
	n, _ := hex.Decode(q.Key[:], []byte(key))
	q.KeyLen = uint32(n)
	return q
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])[:12]
}

func TestPlace(t *testing.T) {
	p := newPolicy(t)
	for _, c := range []struct {
		q    *abi.PlaceQuery
		want string
	}{
		{query(1, "abcdef0123456789", 0, 0), "meta-llama_Llama-3.1-8B_" + digest(plainText) + "_r0/abc/de_g0/abcdef0123456789.bin"},
		{query(2, "00112233445566778899aabbccddeeff", 3, 15), "meta-llama_Llama-3.1-8B_" + digest(vllmFields) + "_r15/001/12_g3/00112233445566778899aabbccddeeff.bin"},
		{query(2, strings.Repeat("f0", 32), 4294967295, 4294967295), "meta-llama_Llama-3.1-8B_" + digest(vllmFields) + "_r4294967295/f0f/0f_g4294967295/" + strings.Repeat("f0", 32) + ".bin"},
	} {
		path, root := p.Place(c.q, nil, []byte("x"))
		if string(path) != "x"+c.want || root != abi.None {
			t.Errorf("got %s on root %d, want %s", path, root, c.want)
		}
	}
}

// The digest of vLLM's own fields, worked out with Python's hashlib.
func TestVLLMDigest(t *testing.T) {
	path, _ := newPolicy(t).Place(query(2, "abcdef0123456789", 0, 0), nil, nil)
	if !strings.Contains(string(path), "_ae478a63c7fb_r0/") {
		t.Errorf("the path is %s, want vLLM's digest in it", path)
	}
}

func TestModelNames(t *testing.T) {
	for model, want := range map[string]string{
		"gpt2": "gpt2", "a/b/c": "a_b_c", "./local": "__local", "naïve model": "na__ve_model", "": "", strings.Repeat("m", 300): strings.Repeat("m", 200),
	} {
		if got := sanitize(model); got != want {
			t.Errorf("%q became %q, want %q", model, got, want)
		}
	}
}

func TestPlaceNamesNothingUnknown(t *testing.T) {
	p := newPolicy(t)
	p.Namespace(5, plainText) // the directory is namespace 1's
	p.Namespace(99, plainText)
	for _, q := range []*abi.PlaceQuery{
		{Namespace: 0, KeyLen: 16}, {Namespace: 5, KeyLen: 16}, {Namespace: 99, KeyLen: 16}, {Namespace: 1}, {Namespace: 1, KeyLen: 2}, {Namespace: 1, KeyLen: 33},
	} {
		if path, _ := p.Place(q, nil, nil); len(path) != 0 {
			t.Errorf("the path for %+v is %s, want none", q, path)
		}
	}
	p.Namespace(1, vllmText+"extra.x=1\n") // and when that one moves away it may have it
	p.Namespace(5, plainText)
	if path, _ := p.Place(query(5, "abcdef0123456789", 0, 0), nil, nil); len(path) == 0 {
		t.Error("namespace 5 has no name")
	}
}

func TestUint(t *testing.T) {
	for _, v := range []uint32{0, 1, 9, 10, 99, 4096, math.MaxUint32} {
		if got, want := string(appendUint([]byte("x"), v)), "x"+strconv.FormatUint(uint64(v), 10); got != want {
			t.Errorf("%d was spelled %s, want %s", v, got, want)
		}
	}
}

func TestKey(t *testing.T) {
	q := &abi.PlaceQuery{KeyLen: 4, Key: [abi.KeyBytes]byte{0xab, 0, 1, 0xff}}
	text := appendKey(nil, q)
	if string(text) != "ab0001ff" {
		t.Fatalf("spelled %s", text)
	}
	if got := appendKey(nil, &abi.PlaceQuery{KeyLen: abi.KeyBytes + 1}); len(got) != 0 {
		t.Errorf("a key that is too long was spelled %s", got)
	}
}
