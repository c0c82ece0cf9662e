package policy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// alter replaces text in a file of an artefact. Consistently: a blob gets the name of its new digest, and so do, on and on, those
// that name it, as an attacker would do it.
func alter(t *testing.T, dir, file, from, to string, consistent bool) {
	t.Helper()
	path := filepath.Join(dir, file)
	b, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(b), from) {
		t.Fatalf("%s: want %q in it to replace, got %q, %v", path, from, b, err)
	}
	text := strings.Replace(string(b), from, to, 1)
	was, is := filepath.Base(file), digestOf([]byte(text))
	if file == "index.json" || !consistent {
		is = was
	}
	testenv.OK(t, os.Remove(path))
	testenv.OK(t, os.WriteFile(filepath.Join(filepath.Dir(path), is), []byte(text), 0o600))
	for again := was != is; again; {
		again = false
		names, err := filepath.Glob(filepath.Join(dir, "blobs", "sha256", "*"))
		testenv.OK(t, err)
		for _, name := range append(names, filepath.Join(dir, "index.json")) {
			b, err := os.ReadFile(name)
			testenv.OK(t, err)
			if text := string(b); strings.Contains(text, `"sha256:`+was+`"`) && !strings.Contains(text, "docker-manifest-digest") {
				file, err := filepath.Rel(dir, name)
				testenv.OK(t, err)
				alter(t, dir, file, was, is, true)
				again = true
				break // it has another name now
			}
		}
	}
}

// What cosign v2.6.5 made: `cosign save` of an artefact in a registry, signed by `cosign sign --key`, and of its module the
// signature that `cosign sign-blob --key` wrote.
func TestCosign(t *testing.T) {
	golden := filepath.Join("testdata", "cosign")
	read := func(parts ...string) string {
		names, err := filepath.Glob(filepath.Join(append([]string{golden}, parts...)...))
		if err != nil || len(names) != 1 {
			t.Fatalf("golden %v: want one file, got %v, %v", parts, names, err)
		}
		b, err := os.ReadFile(names[0])
		testenv.OK(t, err)
		return string(b)
	}
	open := func(path, key string) error { return openSigned(t, path, key) }
	key, other := read("cosign.pub"), otherKey
	none := "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
	for name, c := range map[string]struct {
		blob, from, to        string // what is replaced; no blob: in the index
		key                   string
		altered, byAnAttacker error
	}{
		"another module":   {"fc1860f8", "kvhost", "kvhosu", key, ErrArtefact, ErrSignature},
		"another manifest": {"beb7c1de", "m.wasm", "n.wasm", key, ErrArtefact, ErrSignature},
		"another payload":  {"055620b6", "sha256:beb7", "sha256:beb8", key, ErrSignature, ErrSignature},
		"other signatures": {"f2a21ccf", "MEYCIQCe", "MEYCIQCf", key, ErrArtefact, ErrSignature},
		"another key":      {"1ccd770c", "created", "Created", other, ErrSignature, ErrSignature},
		"not a key":        {"1ccd770c", "created", "Created", none, ErrSignature, ErrSignature},
		"a path":           {"", "sha256:beb7", "sha256:../", key, ErrArtefact, ErrArtefact},
		"no manifests":     {"", "manifests", "manifests2", key, ErrArtefact, ErrArtefact},
		"as it is":         {"1ccd770c", "created", "created", key, nil, nil},
		"without a key":    {"055620b6", "optional", "optionam", "", nil, nil},
	} {
		for consistent, want := range map[bool]error{false: c.altered, true: c.byAnAttacker} {
			dir := filepath.Join(t.TempDir(), "mine")
			testenv.OK(t, os.CopyFS(dir, os.DirFS(filepath.Join(golden, "mine"))))
			file := "index.json"
			if c.blob != "" {
				names, err := filepath.Glob(filepath.Join(dir, "blobs", "sha256", c.blob+"*"))
				testenv.OK(t, err)
				file = filepath.Join("blobs", "sha256", filepath.Base(names[0]))
			}
			alter(t, dir, file, c.from, c.to, consistent)
			if err := open(dir, c.key); !errors.Is(err, want) {
				t.Errorf("an artefact with %s, consistent %v: want %v, got %v", name, consistent, want, err)
			}
		}
	}

	path := filepath.Join(t.TempDir(), "mine.wasm")
	testenv.OK(t, os.WriteFile(path, []byte(read("mine", "blobs", "sha256", "fc1860f8*")), 0o600))
	if err := open(path, key); !errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), path+".sig") {
		t.Errorf("a file without a signature: want the name of what lacks, got %v", err)
	}
	signature := read("mine.sig")
	for text, want := range map[string]error{
		signature: nil, signature + "\n": nil, read("mine.bundle"): nil,
		"": ErrSignature, "{}": ErrSignature, strings.Replace(signature, "A", "B", 1): ErrSignature,
	} {
		testenv.OK(t, os.WriteFile(path+".sig", []byte(text), 0o600))
		if err := open(path, key); !errors.Is(err, want) || !errors.Is(open(path, other), ErrSignature) {
			t.Errorf("a file, signed %q: want %v, and by another key %v, got %v", text, want, ErrSignature, err)
		}
	}
}

// otherKey is P-256's generator.
const otherKey = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt\n" +
	"6zOg9KE5RdiYwpZP40Li/hp/m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q==\n-----END PUBLIC KEY-----\n"

// openSigned opens a module with a signature by a key.
func openSigned(t *testing.T, path, key string) error {
	m, err := Open(t.Context(), path, Options{PublicKey: key, Cache: policytest.Cache(t)})
	if err == nil {
		m.Close(t.Context())
	}
	return err
}

// What cosign v3.1.3 made in the same way: bundles, which `cosign save` does not list. A bundle by the same key that attests something
// else, as `cosign attest` makes it, is no signature.
func TestCosign3(t *testing.T) {
	golden := filepath.Join("testdata", "cosign3")
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(golden, name))
		testenv.OK(t, err)
		return string(b)
	}
	const bundle = "blobs/sha256/463d820bec87f0ae115c249315df95cf1de78143adddae7eb53be48e01b0da0a"
	key, signed := read("cosign.pub"), read("mine/"+bundle)
	for name, c := range map[string]struct {
		text, key string
		want      error
	}{
		"as it is":            {signed, key, nil},
		"another key":         {signed, otherKey, ErrSignature},
		"another payload":     {strings.Replace(signed, "eyJfdHlwZSI6", "eyJfdHlwZSI7", 1), key, ErrSignature},
		"another signature":   {strings.Replace(signed, "MEUCIQD7", "MEUCIQD8", 1), key, ErrSignature},
		"another payloadType": {strings.Replace(signed, "in-toto+json", "in-toto+jsom", 1), key, ErrSignature},
		"an attestation":      {read("attested.json"), key, ErrSignature},
		"no bundle":           {"{}", key, ErrSignature},
	} {
		dir := filepath.Join(t.TempDir(), "mine")
		testenv.OK(t, os.CopyFS(dir, os.DirFS(filepath.Join(golden, "mine"))))
		testenv.OK(t, os.Remove(filepath.Join(dir, bundle)))
		testenv.OK(t, os.WriteFile(filepath.Join(dir, "blobs/sha256", digestOf([]byte(c.text))), []byte(c.text), 0o600))
		if err := openSigned(t, dir, c.key); !errors.Is(err, c.want) {
			t.Errorf("an artefact with %s: want %v, got %v", name, c.want, err)
		}
	}
	path := filepath.Join(t.TempDir(), "mine.wasm")
	module := read("mine/blobs/sha256/fc1860f8a1179267c55202954a4483f85b27614ca5c6dad217a577f5b3a708dd")
	testenv.OK(t, os.WriteFile(path, []byte(module), 0o600))
	testenv.OK(t, os.WriteFile(path+".sig", []byte(read("mine.bundle")), 0o600))
	if err := openSigned(t, path, key); err != nil {
		t.Errorf("a file signed by sign-blob: %v", err)
	}
}
