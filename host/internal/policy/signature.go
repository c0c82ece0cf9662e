package policy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"aead.dev/minisign"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// SignatureSuffix follows a module's path in the path of its signature.
const SignatureSuffix = ".minisig"

// maxSignature is more than a signature file can have.
const maxSignature = 64 << 10

// parsePublicKey parses a public key in minisign's format: its line of base64, or the whole file.
func parsePublicKey(text string) (key minisign.PublicKey, err error) {
	err = key.UnmarshalText([]byte(strings.TrimSpace(text)))
	return key, err
}

// keyID is a key's id as minisign prints it.
func keyID(id uint64) string { return fmt.Sprintf("%016X", id) }

// verifySignature checks the signature file next to a module with the operator's key. An embedded module has no
// signature.
func verifySignature(ctx context.Context, publicKey string, f *file) error {
	key, err := parsePublicKey(publicKey)
	if err != nil {
		return fmt.Errorf("%w: public_key: %w", ErrSignature, err)
	}
	if f.path == "" {
		return fmt.Errorf("%w: the configuration wants one by key %s; a policy that is embedded in the host has none (pin "+
			"its SHA-256, which is %s, instead)",
			ErrSignature, keyID(key.ID()), f.digest)
	}
	path := f.path + SignatureSuffix
	text, err := regular.ReadFile(ctx, path, maxSignature)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: no file %s; the configuration wants a signature by key %s of the module, whose SHA-256 is %s",
			ErrSignature, path, keyID(key.ID()), f.digest)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrSignature, err)
	}
	text = bytes.TrimRight(text, "\r\n")
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
