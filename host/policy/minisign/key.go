package minisign

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/crypto/blake2b"
)

const (
	algorithm = "Ed" // of keys, and of signatures of a file itself
	prehashed = "ED" // of signatures of a file's BLAKE2b-512
	checksum  = "B2"
	noKDF     = "\x00\x00"

	idBytes        = 8
	publicKeyBytes = 2 + idBytes + ed25519.PublicKeySize
	checkedBytes   = idBytes + ed25519.PrivateKeySize
	saltBytes      = 32 + 8 + 8 // and two limits of the key derivation
	secretKeyBytes = 2 + 2 + 2 + saltBytes + checkedBytes + blake2b.Size256
)

// ID identifies a key pair: eight random bytes.
type ID [idBytes]byte

// String is the id as minisign prints it.
func (i ID) String() string { return fmt.Sprintf("%016X", binary.LittleEndian.Uint64(i[:])) }

// PublicKey verifies signatures.
type PublicKey struct {
	ID  ID
	key ed25519.PublicKey
}

// ParsePublicKey parses a public key: its line of base64, or the whole file.
func ParsePublicKey(text string) (PublicKey, error) {
	b, err := decode(lastLine(text), publicKeyBytes, "a public key")
	if err != nil {
		return PublicKey{}, err
	}
	if string(b[:2]) != algorithm {
		return PublicKey{}, fmt.Errorf("%w: a public key of algorithm %q, want %q", ErrFormat, b[:2], algorithm)
	}
	return PublicKey{ID: ID(b[2:10]), key: b[10:]}, nil
}

// String is the key's line of base64.
func (k PublicKey) String() string {
	return base64.StdEncoding.EncodeToString(append(append([]byte(algorithm), k.ID[:]...), k.key...))
}

// File is the content of a .pub file.
func (k PublicKey) File() []byte {
	return fmt.Appendf(nil, "%sminisign public key %s\n%s\n", untrusted, k.ID, k)
}

// SecretKey signs files.
type SecretKey struct {
	id  ID
	key ed25519.PrivateKey
}

// Generate returns a new key pair.
func Generate() (SecretKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	k := SecretKey{key: key}
	if err == nil {
		_, err = rand.Read(k.id[:])
	}
	return k, err
}

// Public is the other half of the pair.
func (k SecretKey) Public() PublicKey {
	return PublicKey{ID: k.id, key: k.key.Public().(ed25519.PublicKey)}
}

func (k SecretKey) sum() [blake2b.Size256]byte {
	return blake2b.Sum256(bytes.Join([][]byte{[]byte(algorithm), k.id[:], k.key}, nil))
}

// File is the content of a secret key's file, without a password: it must have mode 0600.
func (k SecretKey) File() []byte {
	sum := k.sum()
	b := bytes.Join([][]byte{[]byte(algorithm + noKDF + checksum), make([]byte, saltBytes), k.id[:], k.key, sum[:]}, nil)
	return fmt.Appendf(nil, "%sminisign secret key %s\n%s\n", untrusted, k.id, base64.StdEncoding.EncodeToString(b))
}

// ParseSecretKey parses a secret key's file. A key with a password is an [ErrEncrypted].
func ParseSecretKey(text string) (SecretKey, error) {
	b, err := decode(lastLine(text), secretKeyBytes, "a secret key")
	if err != nil {
		return SecretKey{}, err
	}
	if string(b[:2]) != algorithm || string(b[4:6]) != checksum {
		return SecretKey{}, fmt.Errorf("%w: a secret key of algorithms %q and %q, want %q and %q", ErrFormat, b[:2], b[4:6],
			algorithm, checksum)
	}
	if string(b[2:4]) != noKDF {
		return SecretKey{}, ErrEncrypted
	}
	b = b[6+saltBytes:]
	k := SecretKey{id: ID(b[:idBytes]), key: b[idBytes:checkedBytes]}
	if sum := k.sum(); !bytes.Equal(sum[:], b[checkedBytes:]) {
		return SecretKey{}, fmt.Errorf("%w: secret key with a wrong checksum", ErrFormat)
	}
	if !bytes.Equal(ed25519.NewKeyFromSeed(k.key.Seed()), k.key) {
		return SecretKey{}, fmt.Errorf("%w: secret key whose public half does not match", ErrFormat)
	}
	return k, nil
}

// lastLine is the line with the key. Comments come before it.
func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return strings.TrimSpace(text[strings.LastIndexByte(text, '\n')+1:])
}

func decode(line string, size int, what string) ([]byte, error) {
	b, err := base64.StdEncoding.Strict().DecodeString(line)
	if err != nil {
		return nil, fmt.Errorf("%w: %s is not base64: %w", ErrFormat, what, err)
	}
	if len(b) != size {
		return nil, fmt.Errorf("%w: %s has %d bytes, want %d", ErrFormat, what, len(b), size)
	}
	return b, nil
}
