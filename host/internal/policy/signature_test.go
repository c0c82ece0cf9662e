package policy

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"aead.dev/minisign"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
	"github.com/kvhost/kvhost/plugins/dist"
)

func TestSignatures(t *testing.T) {
	module := minimal(abi.RoleEvict).Bytes()
	changed := minimal(abi.RoleEvict).With(abi.ExportInitialize, ">").Bytes()
	public, key := newKey(t)
	otherPublic, other := newKey(t)
	sign := func(k minisign.PrivateKey, b []byte) []byte {
		t.Helper()
		s, err := Sign(k, "m.wasm", b)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	file, err := public.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	id, otherID, line := KeyID(public.ID()), KeyID(otherPublic.ID()), public.String()
	sameID := withID(t, otherPublic, line)
	for name, c := range map[string]struct {
		signature []byte
		key       string
		says      []string // none: it loads
	}{
		"signed":               {sign(key, module), line, nil},
		"signed, key's file":   {sign(key, module), string(file) + "\n", nil},
		"not wanted":           {nil, "", nil},
		"missing":              {nil, line, []string{SignatureSuffix, id, digestOf(module)}},
		"another key":          {sign(other, module), line, []string{id, otherID, digestOf(module)}},
		"line ends":            {[]byte(strings.ReplaceAll(string(sign(key, module)), "\n", "\r\n")), line, nil},
		"another key, same id": {sign(key, module), sameID, []string{"did not sign it"}},
		"another module":       {sign(key, changed), line, []string{id, digestOf(changed), digestOf(module)}},
		"not a signature":      {[]byte("x"), line, []string{"invalid signature"}},
		"not a key":            {sign(key, module), "RWQx", []string{"public_key"}},
		"an endless file":      {make([]byte, 10*maxSignature), line, []string{"more than 65536 bytes"}},
		"a changed comment":    {[]byte(strings.Replace(string(sign(key, changed)), digestOf(changed), digestOf(module), 1)), line, []string{"did not sign it", digestOf(module)}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.wasm")
			if err := os.WriteFile(path, module, 0o600); err != nil {
				t.Fatal(err)
			}
			if c.signature != nil {
				if err := os.WriteFile(path+SignatureSuffix, c.signature, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			m, err := Open(t.Context(), path, Options{PublicKey: c.key, Cache: policytest.Cache(t)})
			if err == nil {
				defer m.Close(t.Context())
			}
			if c.says == nil {
				if err != nil {
					t.Error(err)
				}
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
	if err != nil {
		t.Fatal(err)
	}
	return public, secret
}

// withID is a key's line with the id of another: an id proves nothing.
func withID(t *testing.T, key minisign.PublicKey, other string) string {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(key.String())
	if err != nil {
		t.Fatal(err)
	}
	o, err := base64.StdEncoding.DecodeString(other)
	if err != nil {
		t.Fatal(err)
	}
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
	if err := os.WriteFile(path+SignatureSuffix, signature, 0o600); err != nil {
		t.Fatal(err)
	}
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

func TestSecretKeys(t *testing.T) {
	public, secret := newKey(t)
	text, err := secret.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	line := strings.Split(string(text), "\n")[1]
	for name, text := range map[string]string{
		"empty": "", "text": "no key", "a public key": public.String(), "cut": line[:len(line)-4], "changed": "QQQA" + line[4:],
		"a key with a password": "RWRTY0Iy" + line[8:], // Ed Sc B2
	} {
		if _, err := ParseSecretKey([]byte(text)); err == nil {
			t.Errorf("%s: want an error, got a secret key", name)
		}
	}
	_, other := newKey(t)
	otherText, err := other.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	halves, err := ParseSecretKey([]byte(line[:124] + strings.Split(string(otherText), "\n")[1][124:])) // of two keys
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		key  minisign.PrivateKey
		name string
	}{"another public half": {halves, "m.wasm"}, "two lines": {secret, "m\n.wasm"}} {
		if _, err := Sign(c.key, c.name, []byte("module")); !errors.Is(err, ErrSignature) {
			t.Errorf("signing with %s: got %v, want %v", name, err, ErrSignature)
		}
	}
}

// The tool and the host read each other's keys and signatures.
func TestWithTheTool(t *testing.T) {
	testenv.Need(t, testenv.Minisign)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, b []byte, err error) {
		t.Helper()
		if err := errors.Join(err, os.WriteFile(at(name), b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) []byte {
		t.Helper()
		b, err := os.ReadFile(at(name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("minisign", args...).CombinedOutput(); err != nil {
			t.Fatalf("minisign %v: want success, got %v\n%s", args, err, out)
		}
	}
	public, secret := newKey(t)
	text, err := public.MarshalText()
	write("host.pub", append(text, '\n'), err)
	text, err = secret.MarshalText()
	write("host.key", append(text, '\n'), err)
	run("-G", "-W", "-p", at("tool.pub"), "-s", at("tool.key"))
	module := []byte("a policy")
	write("m", module, nil)
	for _, by := range []string{"host", "tool"} {
		key, err := ParseSecretKey(read(by + ".key"))
		if err != nil {
			t.Fatalf("the %s's secret key: want it parsed, got %v", by, err)
		}
		signature, err := Sign(key, "m", module)
		write("m.minisig", signature, err)
		run("-V", "-p", at(by+".pub"), "-m", at("m"))
		for _, form := range []string{"-H", "-l"} {
			run("-S", "-W", form, "-s", at(by+".key"), "-m", at("m"), "-x", at("theirs"))
			if err := verified(t, string(read(by+".pub")), module, read("theirs")); err != nil {
				t.Errorf("minisign -S %s with the %s's key: want a valid signature, got %v", form, by, err)
			}
		}
	}
}
