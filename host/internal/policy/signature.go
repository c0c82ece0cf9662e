package policy

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"aead.dev/minisign"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// SignatureSuffix follows a module's path in the path of its signature.
const SignatureSuffix = ".minisig"

// digestField stands before the module's digest in the trusted comment of a signature.
const digestField = "sha256:"

// maxSignature is more than a signature file can have.
const maxSignature = 64 << 10

// parsePublicKey parses a public key in minisign's format: its line of base64, or the whole file.
func parsePublicKey(text string) (key minisign.PublicKey, err error) {
	err = key.UnmarshalText([]byte(strings.TrimSpace(text)))
	return key, err
}

// ParseSecretKey parses the file of a secret key in minisign's format, which must have no password.
func ParseSecretKey(file []byte) (key minisign.PrivateKey, err error) {
	file = bytes.TrimSpace(file)
	if minisign.IsEncrypted(file) {
		return key, fmt.Errorf("%w: the secret key has a password: make one without (minisign -G -W)", ErrSignature)
	}
	return key, key.UnmarshalText(file)
}

// KeyID is a key's id as minisign prints it.
func KeyID(id uint64) string { return fmt.Sprintf("%016X", id) }

// Sign returns the content of a module's signature file. The trusted comment has the file's name and digest, so that a
// refusal can state both. A key
// that its own public half does not verify is refused.
func Sign(key minisign.PrivateKey, name string, module []byte) ([]byte, error) {
	r := minisign.NewReader(bytes.NewReader(module))
	if _, err := io.Copy(io.Discard, r); err != nil {
		return nil, err
	}
	signature := r.SignWithComments(key, fmt.Sprintf("file:%s %s%s", name, digestField, digestOf(module)),
		"signature of minisign key "+KeyID(key.ID()))
	if public := key.Public().(minisign.PublicKey); !minisign.Verify(public, module, signature) {
		return nil, fmt.Errorf("%w: the secret key %s is damaged, or the name %q has a line's end", ErrSignature, KeyID(key.ID()), name)
	}
	return signature, nil
}

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
			ErrSignature, KeyID(key.ID()), f.digest)
	}
	path := f.path + SignatureSuffix
	text, err := regular.ReadFile(ctx, path, maxSignature)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: no file %s; the configuration wants a signature by key %s of the module, whose SHA-256 is %s",
			ErrSignature, path, KeyID(key.ID()), f.digest)
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
			ErrSignature, path, KeyID(s.KeyID), KeyID(key.ID()), f.digest)
	}
	if minisign.Verify(key, f.bytes, text) {
		return nil
	}
	if signed, ok := signedDigest(key, &s); ok {
		return fmt.Errorf("%w: %s is by key %s, as wanted, which signed other bytes: their SHA-256 is %s, the module's is %s",
			ErrSignature, path, KeyID(s.KeyID), signed, f.digest)
	}
	return fmt.Errorf("%w: %s names key %s, as wanted, but that key did not sign it: the file is altered, or by another key of this id; "+
		"the module's SHA-256 is %s", ErrSignature, path, KeyID(s.KeyID), f.digest)
}

// signedDigest is the digest in the trusted comment of a signature, if the key signed that comment.
func signedDigest(key minisign.PublicKey, s *minisign.Signature) (digest string, ok bool) {
	encoded, err := base64.StdEncoding.DecodeString(key.String())
	if err != nil || !ed25519.Verify(encoded[len(encoded)-ed25519.PublicKeySize:], append(s.Signature[:], s.TrustedComment...), s.CommentSignature[:]) {
		return "", false
	}
	_, after, ok := strings.Cut(s.TrustedComment, digestField)
	digest, _, _ = strings.Cut(after, " ")
	return digest, ok
}
