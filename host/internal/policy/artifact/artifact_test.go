package artifact

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const pinned = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func TestReferences(t *testing.T) {
	for _, text := range []string{
		"oci://registry.example.com/lru", "oci://localhost:5000/policies/lru:1.2", "oci://[::1]:5000/a/b_c/d-e@" + pinned, "oci://r/x@" + pinned,
	} {
		r, err := Parse(text)
		if err != nil || r.String() != text {
			t.Errorf("%s became %s: %v", text, r, err)
		}
	}
	for _, text := range []string{
		"", "lru", "oci://", "oci://lru", "oci:///lru", "oci://r/", "oci://r/X", "oci://r/x:", "oci://r/x@sha256:0", "oci://r/x:1@" + pinned,
		"oci://r/x@" + strings.ToUpper(pinned), "oci://u:p@r/x", "oci://r:port/x", "oci://r/../x", "oci://r/x/", "oci://r/x?y", "https://r/x",
		"oci://r/x@sha512:" + pinned[7:], "oci://r/" + strings.Repeat("x", 2000), "oci://r/x\n",
	} {
		if r, err := Parse(text); !errors.Is(err, ErrReference) {
			t.Errorf("%q became %+v: %v", text, r, err)
		}
	}
	if _, err := Pinned("oci://r/x:1"); !errors.Is(err, ErrReference) || !strings.Contains(err.Error(), "kvhost policy pull oci://r/x:1") {
		t.Errorf("a tag: %v", err)
	}
	for module, label := range map[string]string{"oci://r/a/lru@" + pinned: "lru", "/x/lru.wasm": "lru", "lru": "lru"} {
		if got := Label(module); got != label {
			t.Errorf("%s is called %s, want %s", module, got, label)
		}
	}
}

func FuzzReference(f *testing.F) {
	f.Add("oci://localhost:5000/policies/lru:1.2")
	f.Add("oci://r/x@" + pinned)
	f.Fuzz(func(t *testing.T, text string) {
		if r, err := Parse(text); err == nil && r.String() != text {
			t.Errorf("%q became %q", text, r)
		}
	})
}

func FuzzLayers(f *testing.F) {
	a, err := Pack("x", []byte("module"), []byte("signature"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(a.Manifest)
	f.Fuzz(func(t *testing.T, b []byte) {
		module, signature, err := Layers("", b, 100)
		if err != nil {
			return
		}
		if module.Size <= 0 || module.Size > 100 || signature != nil && (signature.Size <= 0 || signature.Size > MaxSignature) {
			t.Errorf("module %+v, signature %+v", module, signature)
		}
	})
}

// A manifest is a policy's, with layers of bounded size, or it is refused.
func TestManifests(t *testing.T) {
	a, err := Pack("lru", []byte("module"), []byte("signature"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := Pack("lru", []byte("module"), []byte("signature"))
	if err != nil || a.Digest != again.Digest {
		t.Errorf("the same bytes made %s and %s: %v", a.Digest, again.Digest, err)
	}
	m, s, err := Layers(a.Digest, a.Manifest, 6)
	if err != nil || m.Check("module", a.Module) != nil || s.Check("signature", a.Signature) != nil {
		t.Fatal(m, s, err)
	}
	if err := m.Check("module", []byte("nodule")); !errors.Is(err, ErrDigest) {
		t.Errorf("other bytes: %v", err)
	}
	if _, _, err := Layers(a.Digest, append(bytes.Clone(a.Manifest), ' '), 6); !errors.Is(err, ErrDigest) {
		t.Errorf("an altered manifest: %v", err)
	}
	for what, change := range map[string]func(*manifest){
		"another version": func(m *manifest) { m.SchemaVersion = 1 },
		"an index":        func(m *manifest) { m.MediaType = "application/vnd.oci.image.index.v1+json" },
		"an image":        func(m *manifest) { m.ArtifactType = "" },
		"no module":       func(m *manifest) { m.Layers = m.Layers[1:] },
		"two modules":     func(m *manifest) { m.Layers[1].MediaType = moduleType },
		"another layer":   func(m *manifest) { m.Layers[1].MediaType = "text/plain" },
		"a large module":  func(m *manifest) { m.Layers[0].Size = 7 },
		"an empty one":    func(m *manifest) { m.Layers[0].Size = 0 },
		"a negative one":  func(m *manifest) { m.Layers[0].Size = -1 },
		"a large signature": func(m *manifest) {
			m.Layers[1].Size = MaxSignature + 1
		},
		"a path as digest": func(m *manifest) { m.Layers[0].Digest = "sha256:../../etc/passwd" },
	} {
		var changed manifest
		if err := json.Unmarshal(a.Manifest, &changed); err != nil {
			t.Fatal(err)
		}
		change(&changed)
		b, err := json.Marshal(&changed)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := Layers("", b, 6); !errors.Is(err, ErrManifest) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// What was altered in the local store is refused, and pulled anew.
func TestStore(t *testing.T) {
	store := filepath.Join(t.TempDir(), "store")
	a, err := Pack("lru", []byte("module"), []byte("signature"))
	if err != nil {
		t.Fatal(err)
	}
	r := Reference{Registry: "r", Repository: "lru", Digest: a.Digest}
	if _, _, err := Read(t.Context(), store, r, 100); !errors.Is(err, ErrAbsent) || !strings.Contains(err.Error(), "kvhost policy pull "+r.String()) {
		t.Errorf("before it was pulled: %v", err)
	}
	no := errors.New("no")
	if _, err := Write(t.Context(), store, r, a, func(string) error { return no }); !errors.Is(err, no) {
		t.Errorf("a module that is refused: %v", err)
	}
	yes := func(path string) error {
		b, err := os.ReadFile(path)
		if err != nil || string(b) != "module" {
			t.Errorf("%s: %q, %v", path, b, err)
		}
		return nil
	}
	for _, name := range []string{"", manifestFile, moduleFile, signatureFile} {
		path, err := Write(t.Context(), store, r, a, yes)
		if err != nil {
			t.Fatal(err)
		}
		if p, b, err := Read(t.Context(), store, r, 100); p != path || string(b) != "module" || err != nil {
			t.Fatalf("%s, %q, %v", p, b, err)
		}
		if name == "" {
			continue
		}
		file := filepath.Join(filepath.Dir(path), name)
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Read(t.Context(), store, r, 100); !errors.Is(err, ErrDigest) {
			t.Errorf("%s altered: %v", name, err)
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Read(t.Context(), store, r, 100); err == nil {
			t.Errorf("%s removed, and the module taken", name)
		}
	}
	left, err := os.ReadDir(store)
	if err != nil || len(left) != 1 {
		t.Errorf("%v are left: %v", left, err)
	}
}
