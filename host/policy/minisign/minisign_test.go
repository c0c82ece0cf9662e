package minisign

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// Keys and signatures that the tool itself made, of a file that holds "test".
const (
	theirKey    = "untrusted comment: minisign public key E7620F1842B4E81F\nRWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\n"
	theirLegacy = "untrusted comment: signature from minisign secret key\n" +
		"RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n" +
		"trusted comment: timestamp:1555779966\tfile:test\n" +
		"QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA==\n"
	theirHashed = "untrusted comment: signature from minisign secret key\n" +
		"RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n" +
		"trusted comment: timestamp:1556193335\tfile:test\n" +
		"y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n"
)

func TestSignaturesOfTheTool(t *testing.T) {
	k, err := ParsePublicKey(theirKey)
	if err != nil || k.ID.String() != "E7620F1842B4E81F" {
		t.Fatal(k.ID, err)
	}
	if bare, err := ParsePublicKey(k.String()); err != nil || bare.ID != k.ID || string(k.File()) != theirKey {
		t.Errorf("%q %v", k.File(), err)
	}
	for name, text := range map[string]string{"legacy": theirLegacy, "prehashed": theirHashed, "line ends": strings.ReplaceAll(theirHashed, "\n", "\r\n")} {
		s, err := ParseSignature(text)
		if err != nil {
			t.Fatal(name, err)
		}
		if err := s.Verify(k, []byte("test")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := s.Verify(k, []byte("Test")); !errors.Is(err, ErrSignature) {
			t.Errorf("%s: other bytes: %v", name, err)
		}
		s.Comment += "x"
		if err := s.Verify(k, []byte("test")); !errors.Is(err, ErrSignature) {
			t.Errorf("%s: another comment: %v", name, err)
		}
	}
}

func TestSignAndVerify(t *testing.T) {
	k, err := Generate()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseSecretKey(string(k.File()))
	if err != nil || !again.key.Equal(k.key) || again.id != k.id {
		t.Fatal(err)
	}
	file := []byte("a policy")
	text, err := again.Sign(file, "file:x.wasm")
	if err != nil {
		t.Fatal(err)
	}
	s, err := ParseSignature(string(text))
	if err != nil || s.Comment != "file:x.wasm" || s.ID != k.Public().ID {
		t.Fatal(s, err)
	}
	if err := s.Verify(k.Public(), file); err != nil {
		t.Error(err)
	}
	other, _ := Generate()
	if err := s.Verify(other.Public(), file); !errors.Is(err, ErrKey) || !strings.Contains(err.Error(), k.id.String()) || !strings.Contains(err.Error(), other.id.String()) {
		t.Errorf("another key: %v", err)
	}
	other.id = k.id // an id proves nothing
	if err := s.Verify(other.Public(), file); !errors.Is(err, ErrSignature) {
		t.Errorf("another key of the same id: %v", err)
	}
	if _, err := k.Sign(file, "two\nlines"); !errors.Is(err, ErrFormat) {
		t.Error(err)
	}
}

func TestBadKeys(t *testing.T) {
	k, _ := Generate()
	secret := k.File()
	line := strings.Split(string(secret), "\n")[1]
	for name, text := range map[string]string{
		"empty": "", "text": "no key", "a public key": k.Public().String(), "cut": line[:len(line)-4], "changed": "QQQA" + line[4:],
		"checksum": line[:len(line)-8] + "AAAAAAA=",
	} {
		if _, err := ParseSecretKey(text); !errors.Is(err, ErrFormat) && !errors.Is(err, ErrEncrypted) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ParseSecretKey("RWRTY0Iy" + line[8:]); !errors.Is(err, ErrEncrypted) { // Ed Sc B2
		t.Errorf("a key with a password: %v", err)
	}
	for name, text := range map[string]string{"empty": "", "a secret key": line, "algorithm": "AAAA" + k.Public().String()[4:]} {
		if _, err := ParsePublicKey(text); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The tool reads what is written here, where it is installed; its own signatures are verified above in any case.
func TestWithTheTool(t *testing.T) {
	testenv.Need(t, testenv.Minisign)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, b []byte) {
		t.Helper()
		if err := os.WriteFile(at(name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("minisign", args...).CombinedOutput(); err != nil {
			t.Fatalf("minisign %v: %v\n%s", args, err, out)
		}
	}
	k, _ := Generate()
	sig, _ := k.Sign([]byte("a policy"), "file:m")
	write("m", []byte("a policy"))
	write("m.minisig", sig)
	write("key.pub", k.Public().File())
	write("key", k.File())
	run("-V", "-p", at("key.pub"), "-m", at("m"))
	for _, legacy := range []string{"-H", "-l"} { // the tool signs with our key
		run("-S", "-W", legacy, "-s", at("key"), "-m", at("m"), "-x", at("theirs"))
		b, err := os.ReadFile(at("theirs"))
		if err != nil {
			t.Fatal(err)
		}
		s, err := ParseSignature(string(b))
		if err == nil {
			err = s.Verify(k.Public(), []byte("a policy"))
		}
		if err != nil {
			t.Errorf("%s: %v", legacy, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	k, _ := Generate()
	sig, _ := k.Sign(nil, "c")
	for _, s := range []string{theirKey, theirLegacy, theirHashed, string(k.File()), string(sig)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := ParseSignature(text); err == nil {
			_ = s.Verify(k.Public(), nil)
		}
		if p, err := ParsePublicKey(text); err == nil {
			if q, err := ParsePublicKey(p.String()); err != nil || q.ID != p.ID {
				t.Error(p, q, err)
			}
		}
		_, _ = ParseSecretKey(text)
	})
}
