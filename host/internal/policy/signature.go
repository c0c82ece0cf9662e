package policy

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"aead.dev/minisign"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// Suffixes of a module's path in the path of its signature, by minisign and by `cosign sign-blob`.
const (
	SignatureSuffix = ".minisig"
	cosignSuffix    = ".sig"
)

// maxSignature is above the size of any signature file.
const maxSignature = 64 << 10

// keyID returns a key's id in minisign's form.
func keyID(id uint64) string { return fmt.Sprintf("%016X", id) }

// verifySignature checks a module's signature with the operator's key. The form of the key decides between minisign and
// cosign.
func verifySignature(ctx context.Context, publicKey string, f *file) error {
	if block, _ := pem.Decode([]byte(publicKey)); block != nil {
		return verifyCosign(ctx, block.Bytes, f)
	}
	var key minisign.PublicKey // its line of base64, or the whole file
	if err := key.UnmarshalText([]byte(strings.TrimSpace(publicKey))); err != nil {
		return fmt.Errorf("%w: public_key: %w", ErrSignature, err)
	}
	text, path, err := f.readSignature(ctx, SignatureSuffix, keyID(key.ID()))
	if err != nil {
		return err
	}
	var s minisign.Signature
	if err := s.UnmarshalText(text); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrSignature, path, err)
	}
	if s.KeyID != key.ID() {
		return fmt.Errorf("%w: %s is by key %s, the configuration wants key %s; the module's SHA-256 is %s",
			ErrSignature, path, keyID(s.KeyID), keyID(key.ID()), f.digest)
	}
	if minisign.Verify(key, f.bytes, text) {
		return nil
	}
	return fmt.Errorf("%w: %s names key %s, as wanted, but that key did not sign these bytes: one of the two files is altered, or "+
		"the signature is by another key of this id; the module's SHA-256 is %s", ErrSignature, path, keyID(s.KeyID), f.digest)
}

// readSignature reads the file next to a module. An embedded module has none.
func (f *file) readSignature(ctx context.Context, suffix, key string) (text []byte, path string, err error) {
	if f.path == "" {
		return nil, "", fmt.Errorf("%w: the configuration wants one by key %s; a policy that is embedded in the host has none (pin "+
			"its SHA-256, which is %s, instead)", ErrSignature, key, f.digest)
	}
	path = f.path + suffix
	text, err = regular.ReadFile(ctx, path, maxSignature)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, path, fmt.Errorf("%w: no file %s; the configuration wants a signature by key %s of the module, whose SHA-256 is %s",
			ErrSignature, path, key, f.digest)
	}
	if err != nil {
		return nil, path, fmt.Errorf("%w: %w", ErrSignature, err)
	}
	return bytes.TrimRight(text, "\r\n"), path, nil
}

// signature is a payload of cosign, and its signature in base64.
type signature struct {
	payload []byte
	text    string
}

// verifyCosign checks the signature of an artefact's manifest, or that of a module's bytes in the file next to it. No
// transparency log is consulted.
func verifyCosign(ctx context.Context, der []byte, f *file) error {
	parsed, err := x509.ParsePKIXPublicKey(der)
	key, ok := parsed.(*ecdsa.PublicKey)
	if err != nil || !ok || key.Curve != elliptic.P256() {
		return fmt.Errorf("%w: public_key: want a key of ECDSA on P-256, as `cosign generate-key-pair` makes it", ErrSignature)
	}
	id := digestOf(der)[:16]
	var list []signature
	where := f.path + ", which holds an artefact,"
	if f.artefact != nil {
		if list, err = f.artefact.signed(ctx); err != nil {
			return fmt.Errorf("%w: %w", ErrSignature, err)
		}
	} else {
		var text []byte
		if text, where, err = f.readSignature(ctx, cosignSuffix, id); err != nil {
			return err
		}
		var bundle struct{ MessageSignature struct{ Signature string } } // the form of --new-bundle-format, which is JSON
		if json.Unmarshal(text, &bundle) == nil {
			text = []byte(bundle.MessageSignature.Signature)
		}
		list = append(list, signature{f.bytes, string(text)})
	}
	for _, s := range list {
		sum := sha256.Sum256(s.payload)
		if b, err := base64.StdEncoding.DecodeString(s.text); err == nil && ecdsa.VerifyASN1(key, sum[:], b) {
			return nil
		}
	}
	return fmt.Errorf("%w: %s has no signature of this module by the key with the SHA-256 %s...; the module's SHA-256 is %s",
		ErrSignature, where, id, f.digest)
}
