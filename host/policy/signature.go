package policy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/kvhost/kvhost/host/policy/minisign"
	"github.com/kvhost/kvhost/host/regular"
)

// SignatureSuffix follows a module's path in the path of its signature.
const SignatureSuffix = ".minisig"

// digestField stands before the module's digest in the trusted comment of a signature.
const digestField = "sha256:"

// maxSignature is more than a signature file can have.
const maxSignature = 64 << 10

// Sign returns the content of a module's signature file. The trusted comment has the file's name and digest, so that a
// refusal can state both.
func Sign(key minisign.SecretKey, name string, module []byte) ([]byte, error) {
	return key.Sign(module, fmt.Sprintf("file:%s %s%s", name, digestField, digestOf(module)))
}

// verifySignature checks the signature file beside a module with the operator's key. An embedded module has no
// signature.
func verifySignature(ctx context.Context, publicKey string, f *file) error {
	key, err := minisign.ParsePublicKey(publicKey)
	if err != nil {
		return fmt.Errorf("%w: public_key: %w", ErrSignature, err)
	}
	if f.path == "" {
		return fmt.Errorf("%w: the configuration wants one by key %s; a policy that is embedded in the host has none (pin "+
			"its SHA-256, which is %s, instead)",
			ErrSignature, key.ID, f.digest)
	}
	path := f.path + SignatureSuffix
	text, err := regular.ReadFile(ctx, path, maxSignature)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: no file %s; the configuration wants a signature by key %s of the module, whose SHA-256 is %s",
			ErrSignature, path, key.ID, f.digest)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrSignature, err)
	}
	s, err := minisign.ParseSignature(string(text))
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrSignature, path, err)
	}
	if err := s.Verify(key, f.bytes); err != nil {
		signed := "unknown"
		if s.VerifyComment(key) == nil { // the key vouches for the comment, if not for these bytes
			if _, after, ok := strings.Cut(s.Comment, digestField); ok {
				signed, _, _ = strings.Cut(after, " ")
			}
		}
		if s.ID == key.ID {
			return fmt.Errorf("%w: %s is by key %s, as wanted, but of other bytes: it signed SHA-256 %s, the module's is %s: %w",
				ErrSignature, path, s.ID, signed, f.digest, err)
		}
		return fmt.Errorf("%w: %s is by key %s, the configuration wants key %s; signed SHA-256 %s, the module's is %s: %w",
			ErrSignature, path, s.ID, key.ID, signed, f.digest, err)
	}
	return nil
}
