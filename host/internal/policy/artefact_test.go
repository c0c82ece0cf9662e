package policy

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"aead.dev/minisign"
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/plugins/dist"
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

func TestSignatures(t *testing.T) {
	module := minimal(abi.RoleEvict).Bytes()
	changed := minimal(abi.RoleEvict).With(abi.ExportInitialize, ">").Bytes()
	public, key := newKey(t)
	otherPublic, other := newKey(t)
	file, err := public.MarshalText()
	testenv.OK(t, err)
	id, otherID, line := keyID(public.ID()), keyID(otherPublic.ID()), public.String()
	sameID := withID(t, otherPublic, line)
	for name, c := range map[string]struct {
		signature []byte
		key       string
		says      []string // none: it loads
	}{
		"signed":               {minisign.Sign(key, module), line, nil},
		"signed, key's file":   {minisign.Sign(key, module), string(file) + "\n", nil},
		"not wanted":           {nil, "", nil},
		"missing":              {nil, line, []string{SignatureSuffix, id, digestOf(module)}},
		"another key":          {minisign.Sign(other, module), line, []string{id, otherID, digestOf(module)}},
		"line ends":            {[]byte(strings.ReplaceAll(string(minisign.Sign(key, module)), "\n", "\r\n")), line, nil},
		"another key, same id": {minisign.Sign(key, module), sameID, []string{"did not sign these bytes"}},
		"another module":       {minisign.Sign(key, changed), line, []string{id, "did not sign these bytes", digestOf(module)}},
		"not a signature":      {[]byte("x"), line, []string{"invalid signature"}},
		"not a key":            {minisign.Sign(key, module), "RWQx", []string{"public_key"}},
		"an endless file":      {make([]byte, 10*maxSignature), line, []string{"more than 65536 bytes"}},
		"a changed comment":    {[]byte(strings.Replace(string(minisign.Sign(key, module)), "\ntrusted comment: ", "\ntrusted comment: x", 1)), line, []string{"did not sign these bytes", digestOf(module)}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.wasm")
			testenv.OK(t, os.WriteFile(path, module, 0o600))
			if c.signature != nil {
				testenv.OK(t, os.WriteFile(path+SignatureSuffix, c.signature, 0o600))
			}
			m, err := Open(t.Context(), path, Options{PublicKey: c.key, Cache: policytest.Cache(t)})
			if err == nil {
				defer m.Close(t.Context())
			}
			if c.says == nil {
				testenv.NoError(t, err)
				return
			}
			if !errors.Is(err, ErrSignature) || !errors.Is(err, ErrBadModule) {
				t.Fatalf("opening it: got %v, want %v", err, ErrSignature)
			}
			for _, s := range append(c.says, path) {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("got %v, want %q in it", err, s)
				}
			}
		})
	}
	t.Run("an embedded policy", func(t *testing.T) {
		embedded, err := dist.Read("lru")
		if err != nil {
			t.Skip("no policy is embedded; make plugins builds them")
		}
		_, err = Open(t.Context(), "lru", Options{PublicKey: line})
		if !errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), digestOf(embedded)) {
			t.Errorf("an embedded policy with a key: got %v, want %v", err, ErrSignature)
		}
	})
}

// TestEarlierSignature: a signature has no end and no order, so an earlier module by the same key is taken where the key alone is wanted, and not
// where the digest is.
func TestEarlierSignature(t *testing.T) {
	earlier := minimal(abi.RoleEvict).Bytes()
	current := minimal(abi.RoleEvict).With(abi.ExportInitialize, ">").Bytes()
	public, key := newKey(t)
	path := filepath.Join(t.TempDir(), "m.wasm")
	testenv.OK(t, os.WriteFile(path, earlier, 0o600))
	testenv.OK(t, os.WriteFile(path+SignatureSuffix, minisign.Sign(key, earlier), 0o600))
	o := Options{PublicKey: public.String(), Cache: policytest.Cache(t)}
	m, err := Open(t.Context(), path, o)
	testenv.OK(t, err)
	testenv.OK(t, m.Close(t.Context()))
	o.SHA256 = digestOf(current)
	if _, err := Open(t.Context(), path, o); !errors.Is(err, ErrDigest) {
		t.Errorf("an earlier module where the digest is pinned: %v, want %v", err, ErrDigest)
	}
}

func newKey(t testing.TB) (minisign.PublicKey, minisign.PrivateKey) {
	t.Helper()
	public, secret, err := minisign.GenerateKey(rand.Reader)
	testenv.OK(t, err)
	return public, secret
}

// withID is a key's line with the id of another: an id proves nothing.
func withID(t *testing.T, key minisign.PublicKey, other string) string {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(key.String())
	testenv.OK(t, err)
	o, err := base64.StdEncoding.DecodeString(other)
	testenv.OK(t, err)
	copy(b[:10], o) // the algorithm and the id
	return base64.StdEncoding.EncodeToString(b)
}

// A key and signatures that the tool itself made, of a file that holds "test".
const (
	toolKey       = "untrusted comment: minisign public key E7620F1842B4E81F\nRWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\n"
	toolSignature = "untrusted comment: signature from minisign secret key\n" + // of the file
		"RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n" +
		"trusted comment: timestamp:1555779966\tfile:test\n" +
		"QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA==\n"
	toolPrehashed = "untrusted comment: signature from minisign secret key\n" + // of the file's BLAKE2b
		"RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n" +
		"trusted comment: timestamp:1556193335\tfile:test\n" +
		"y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n"
)

// verified is what verifySignature says of a file and its signature.
func verified(t testing.TB, publicKey string, bytes, signature []byte) error {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m")
	testenv.OK(t, os.WriteFile(path+SignatureSuffix, signature, 0o600))
	return verifySignature(t.Context(), publicKey, &file{path: path, bytes: bytes, digest: digestOf(bytes)})
}

func TestSignaturesOfTheTool(t *testing.T) {
	for name, text := range map[string]string{"legacy": toolSignature, "prehashed": toolPrehashed, "line ends": strings.ReplaceAll(toolPrehashed, "\n", "\r\n")} {
		if err := verified(t, toolKey, []byte("test"), []byte(text)); err != nil {
			t.Errorf("%s: want a valid signature, got %v", name, err)
		}
		for change, err := range map[string]error{
			"bytes":     verified(t, toolKey, []byte("Test"), []byte(text)),
			"comment":   verified(t, toolKey, []byte("test"), []byte(strings.Replace(text, "file:test", "file:tesT", 1))),
			"algorithm": verified(t, toolKey, []byte("test"), []byte(strings.NewReplacer("\nRWQ", "\nRUQ", "\nRUQ", "\nRWQ").Replace(text))),
			"signature": verified(t, toolKey, []byte("test"), []byte(strings.Replace(text, "i5", "j5", 1))),
		} {
			if !errors.Is(err, ErrSignature) {
				t.Errorf("%s, with other %s: want %v, got %v", name, change, ErrSignature, err)
			}
		}
	}
}

// TestManySignatures: whoever writes an artefact's files makes the host hold little, whatever they say: many signatures of a large statement,
// many layers that are the same payload, or a long list of nothing.
func TestManySignatures(t *testing.T) {
	manifest := "sha256:" + strings.Repeat("a", 64)
	payload := fmt.Appendf(nil, `{"critical":{"type":"cosign container image signature","image":{"docker-manifest-digest":%q}},"x":%q}`, manifest, strings.Repeat("x", maxSignature/2))
	layer := fmt.Sprintf(`{"mediaType":%q,"digest":"sha256:%s"}`, cosignType, digestOf(payload))
	envelope := func(n int) string {
		return fmt.Sprintf(`{"dsseEnvelope":{"payload":%q,"signatures":[{}%s]}}`, base64.StdEncoding.EncodeToString(payload), strings.Repeat(",{}", n-1))
	}
	for what, c := range map[string]struct {
		blobs []string
		want  int // signatures; 0: refused
	}{
		"a few signatures":    {[]string{envelope(maxBlobs)}, maxBlobs},
		"many signatures":     {[]string{envelope(1000)}, 0},
		"many in two bundles": {[]string{envelope(maxBlobs), envelope(maxBlobs) + " "}, 0},
		"layers":              {[]string{`{"layers":[` + layer + strings.Repeat(","+layer, 1000) + `]}`}, 0},
		"a module":            {[]string{envelope(1), `{"layers":[{}` + strings.Repeat(",{}", 5<<20) + `]}`}, 1},
	} {
		t.Run(what, func(t *testing.T) {
			a := &artefact{dir: t.TempDir(), manifest: manifest}
			dir := filepath.Join(a.dir, "blobs", "sha256")
			testenv.OK(t, os.MkdirAll(dir, 0o700))
			for _, b := range append(c.blobs, string(payload)) {
				testenv.OK(t, os.WriteFile(filepath.Join(dir, digestOf([]byte(b))), []byte(b), 0o600))
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			list, err := a.signed(t.Context())
			runtime.ReadMemStats(&after)
			if len(list) != c.want || (err == nil) != (c.want > 0) || err != nil && !errors.Is(err, ErrArtefact) {
				t.Errorf("%d signatures, %v, want %d", len(list), err, c.want)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
				t.Errorf("%d bytes were allocated, want at most 8 MiB", n)
			}
		})
	}
}
