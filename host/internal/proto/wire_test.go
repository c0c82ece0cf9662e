package proto_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

func namespace() *kv.Namespace {
	return &kv.Namespace{
		Model: "m", Revision: "r", DType: "bf16", Engine: "e", HashAlgorithm: "sha256", HashSeed: "0",
		KeyBytes: 16, TokensPerBlock: 16, TensorParallel: 2, PipelineStages: 1, ContextParallel: 1,
		Groups: []kv.Group{
			{ID: 0, Geometry: kv.Uniform(4, 2, 2, 4096)},
			{ID: 3, Lookup: kv.ByMembership, Geometry: kv.Uniform(1, 1, 1, 100)},
		},
		Extra: map[string]string{"page": "hnd"},
	}
}

func TestNamespaceSurvivesTheWire(t *testing.T) {
	n := namespace()
	got, err := proto.FromNamespace(n).ToNamespace()
	testenv.OK(t, err)
	if d := n.Diff(got); d != "" || n.Digest() != got.Digest() {
		t.Fatalf("differs: %s", d)
	}
}

func TestBadNamespaces(t *testing.T) {
	for name, spoil := range map[string]func(*proto.Namespace){
		"no model":         func(m *proto.Namespace) { m.Model = "" },
		"lookup kind":      func(m *proto.Namespace) { m.Groups[0].Lookup = 7 },
		"nil group":        func(m *proto.Namespace) { m.Groups[0] = nil },
		"nil plane":        func(m *proto.Namespace) { m.Groups[0].Planes[0] = nil },
		"groups":           func(m *proto.Namespace) { m.Groups = make([]*proto.Group, proto.MaxGroups+1) },
		"planes":           func(m *proto.Namespace) { m.Groups[0].Planes = make([]*proto.Plane, kv.MaxPlanes+1) },
		"parallel sizes":   func(m *proto.Namespace) { m.TensorParallel, m.PipelineStages = 1<<31, 1<<31 },
		"product of sizes": func(m *proto.Namespace) { m.TensorParallel, m.PipelineStages, m.ContextParallel = 1<<16, 1<<16, 1<<16 },
		"key bytes":        func(m *proto.Namespace) { m.KeyBytes = 1 << 31 },
		"line break":       func(m *proto.Namespace) { m.Model = "a\nmodel=b" },
		"too many extra keys": func(m *proto.Namespace) {
			for i := range proto.MaxExtra + 1 {
				m.Extra[string(rune('a'+i))] = ""
			}
		},
	} {
		m := proto.FromNamespace(namespace())
		spoil(m)
		if _, err := m.ToNamespace(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := (*proto.Namespace)(nil).ToNamespace(); !errors.Is(err, proto.ErrMessage) {
		t.Errorf("no namespace: %v", err)
	}
}

func TestKeysPack(t *testing.T) {
	keys := []kv.Key{{1}, {2, 3}, {15: 9}}
	packed := proto.PackKeys(keys, 16)
	if len(packed) != 48 {
		t.Fatalf("%d bytes", len(packed))
	}
	got, err := proto.ParseKeys(nil, packed, 16)
	if err != nil || len(got) != 3 || got[0] != keys[0] || got[1] != keys[1] || got[2] != keys[2] {
		t.Fatalf("parsed keys: got %v, %v", got, err)
	}
	for name, b := range map[string][]byte{"short": packed[:47], "zero": make([]byte, 16)} {
		if _, err := proto.ParseKeys(nil, b, 16); !errors.Is(err, proto.ErrMessage) {
			t.Errorf("parse keys, %s: got error %v, want a bad message", name, err)
		}
		if _, err := proto.ParseKey(b, 16); !errors.Is(err, proto.ErrMessage) {
			t.Errorf("parse a key, %s: got error %v, want a bad message", name, err)
		}
	}
}

func TestDescriptorMessage(t *testing.T) {
	nonce := bytes.Repeat([]byte{7}, proto.NonceBytes)
	n, tag, err := proto.ParseDescriptor(proto.AppendDescriptor(nil, nonce, 0x0102030405060708))
	if err != nil || !bytes.Equal(n[:], nonce) || tag != 0x0102030405060708 {
		t.Fatalf("parsed descriptor message: got nonce %x, tag %x, %v", n, tag, err)
	}
	if _, _, err := proto.ParseDescriptor(nonce); !errors.Is(err, proto.ErrMessage) {
		t.Fatalf("short: %v", err)
	}
}
