package policy

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aead.dev/minisign"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/plugins/dist"
)

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
