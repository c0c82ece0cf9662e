package minisign

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"strings"

	"golang.org/x/crypto/blake2b"
)

const (
	untrusted = "untrusted comment: "
	trusted   = "trusted comment: "

	signatureBytes = 2 + idBytes + ed25519.SignatureSize
	maxComment     = 8192
)

// Signature is the content of a .minisig file.
type Signature struct {
	ID      ID     // of the key that signed
	Comment string // the trusted comment, which is signed too
	hashed  bool
	file    []byte // signature of the file
	global  []byte // signature of that and the comment
}

// Sign signs a file's bytes and a comment of one line, and returns the content of the .minisig file.
func (k SecretKey) Sign(file []byte, comment string) ([]byte, error) {
	if strings.ContainsAny(comment, "\r\n") || len(comment) > maxComment {
		return nil, fmt.Errorf("%w: a comment of more than one line, or of more than %d bytes", ErrFormat, maxComment)
	}
	sum := blake2b.Sum512(file)
	sig := ed25519.Sign(k.key, sum[:])
	global := ed25519.Sign(k.key, append(bytes.Clone(sig), comment...))
	line := bytes.Join([][]byte{[]byte(prehashed), k.id[:], sig}, nil)
	return fmt.Appendf(nil, "%ssignature of minisign key %s\n%s\n%s%s\n%s\n", untrusted, k.id,
		base64.StdEncoding.EncodeToString(line), trusted, comment, base64.StdEncoding.EncodeToString(global)), nil
}

// ParseSignature parses a .minisig file. It verifies nothing.
func ParseSignature(text string) (Signature, error) {
	lines := strings.Split(strings.TrimRight(strings.ReplaceAll(text, "\r\n", "\n"), "\n"), "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[0], untrusted) || !strings.HasPrefix(lines[2], trusted) {
		return Signature{}, fmt.Errorf("%w: a signature has four lines: a comment, base64, a trusted comment, base64",
			ErrFormat)
	}
	b, err := decode(lines[1], signatureBytes, "a signature")
	if err != nil {
		return Signature{}, err
	}
	s := Signature{ID: ID(b[2:10]), Comment: lines[2][len(trusted):], hashed: string(b[:2]) == prehashed, file: b[10:]}
	if !s.hashed && string(b[:2]) != algorithm {
		return Signature{}, fmt.Errorf("%w: a signature of algorithm %q, want %q or %q", ErrFormat, b[:2], prehashed,
			algorithm)
	}
	s.global, err = decode(lines[3], ed25519.SignatureSize, "a global signature")
	return s, err
}

// Verify checks that the key signed these bytes and the comment.
func (s Signature) Verify(k PublicKey, file []byte) error {
	if err := s.VerifyComment(k); err != nil {
		return err
	}
	if s.hashed {
		sum := blake2b.Sum512(file)
		file = sum[:]
	}
	if !ed25519.Verify(k.key, file, s.file) {
		return fmt.Errorf("%w: key %s signed other bytes", ErrSignature, s.ID)
	}
	return nil
}

// VerifyComment checks only that the key signed the comment, whatever the bytes are.
func (s Signature) VerifyComment(k PublicKey) error {
	if s.ID != k.ID {
		return fmt.Errorf("%w: signed with key %s, want %s", ErrKey, s.ID, k.ID)
	}
	if !ed25519.Verify(k.key, append(bytes.Clone(s.file), s.Comment...), s.global) {
		return fmt.Errorf("%w: key %s signed another comment", ErrSignature, s.ID)
	}
	return nil
}
