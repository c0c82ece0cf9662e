package policy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy/minisign"
	"github.com/kvhost/kvhost/host/policy/policytest"
	"github.com/kvhost/kvhost/plugins/dist"
)

func TestSignatures(t *testing.T) {
	module := minimal(abi.RoleEvict).bytes()
	changed := minimal(abi.RoleEvict).with(abi.ExportInitialize, ">").bytes()
	key, err := minisign.Generate()
	if err != nil {
		t.Fatal(err)
	}
	other, err := minisign.Generate()
	if err != nil {
		t.Fatal(err)
	}
	sign := func(k minisign.SecretKey, b []byte) []byte {
		t.Helper()
		s, err := Sign(k, "m.wasm", b)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	id, public := key.Public().ID.String(), key.Public().String()
	for name, c := range map[string]struct {
		signature []byte
		key       string
		says      []string // none: it loads
	}{
		"signed":             {sign(key, module), public, nil},
		"signed, key's file": {sign(key, module), string(key.Public().File()), nil},
		"not wanted":         {nil, "", nil},
		"missing":            {nil, public, []string{SignatureSuffix, id, digestOf(module)}},
		"another key":        {sign(other, module), public, []string{id, other.Public().ID.String(), digestOf(module)}},
		"another module":     {sign(key, changed), public, []string{id, digestOf(changed), digestOf(module)}},
		"not a signature":    {[]byte("x"), public, []string{"four lines"}},
		"not a key":          {sign(key, module), "RWQx", []string{"public_key"}},
		"an endless file":    {make([]byte, 10*maxSignature), public, []string{"more than 65536 bytes"}},
		"somebody's comment": {[]byte(strings.Replace(string(sign(key, changed)), digestOf(changed), digestOf(module), 1)), public, []string{"signed SHA-256 unknown"}},
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
				t.Fatalf("got %v", err)
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
		_, err = Open(t.Context(), "lru", Options{PublicKey: public})
		if !errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), digestOf(embedded)) {
			t.Errorf("got %v", err)
		}
	})
}
