package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"

	"golang.org/x/crypto/nacl/secretbox"
	"golang.org/x/crypto/scrypt"
)

var errKey = errors.New("want a key of `cosign generate-key-pair`, or a PEM of ECDSA in PKCS #8")

// readCosignKey reads a key for signatures like cosign's. The key may be one of `cosign generate-key-pair`, with its password in
// COSIGN_PASSWORD, or a key without a password.
func (r *release) readCosignKey(path string) error {
	if path == "" {
		return nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return fmt.Errorf("the key %s: %w", path, errKey)
	}
	der := block.Bytes
	switch block.Type {
	case "PRIVATE KEY":
	case "ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY":
		if der, err = unlock(der, os.Getenv("COSIGN_PASSWORD")); err != nil {
			return fmt.Errorf("the key %s: %w", path, err)
		}
	default:
		return fmt.Errorf("the key %s is a %s: %w", path, block.Type, errKey)
	}
	any, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return fmt.Errorf("the key %s: %w", path, err)
	}
	key, ok := any.(*ecdsa.PrivateKey)
	if !ok {
		return fmt.Errorf("the key %s: %w", path, errKey)
	}
	r.cosign = key
	return nil
}

// unlock decrypts a key that cosign has encrypted with a password.
func unlock(text []byte, password string) ([]byte, error) {
	var locked struct {
		KDF struct {
			Name   string
			Params struct{ N, R, P int }
			Salt   []byte
		}
		Cipher struct {
			Name  string
			Nonce []byte
		}
		Text []byte `json:"ciphertext"`
	}
	if err := json.Unmarshal(text, &locked); err != nil {
		return nil, err
	}
	if locked.KDF.Name != "scrypt" || locked.Cipher.Name != "nacl/secretbox" || len(locked.Cipher.Nonce) != 24 {
		return nil, fmt.Errorf("it is locked by %s and %s: %w", locked.KDF.Name, locked.Cipher.Name, errKey)
	}
	p := locked.KDF.Params
	key, err := scrypt.Key([]byte(password), locked.KDF.Salt, p.N, p.R, p.P, 32)
	if err != nil {
		return nil, err
	}
	open, ok := secretbox.Open(nil, locked.Text, (*[24]byte)(locked.Cipher.Nonce), (*[32]byte)(key))
	if !ok {
		return nil, errors.New("COSIGN_PASSWORD does not open it")
	}
	return open, nil
}

// signText returns cosign's signature of a text. It is the same each time for a key and a text.
func signText(key *ecdsa.PrivateKey, text []byte) (string, error) {
	sum := sha256.Sum256(text)
	signature, err := key.Sign(nil, sum[:], crypto.SHA256)
	return base64.StdEncoding.EncodeToString(signature), err
}

// signBlob writes a signature in the form of `cosign sign-blob`.
func signBlob(key *ecdsa.PrivateKey, text []byte, path string) error {
	signature, err := signText(key, text)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(signature), 0o644)
}

// signImage adds the signature of an image to its layout. It is stored in the place that `cosign save` uses, under the tag that `cosign
// verify` looks up in a registry.
func signImage(l *layout, key *ecdsa.PrivateKey, digest string) (descriptor, error) {
	payload := fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"kvhost"},"image":{"docker-manifest-digest":"%s"},`+
		`"type":"cosign container image signature"},"optional":null}`, digest)
	signature, err := signText(key, payload)
	if err != nil {
		return descriptor{}, err
	}
	layer := l.add(signatureType, payload)
	c := imageConfig{}
	c.RootFS.Type, c.RootFS.Diffs = "layers", []string{layer.Digest}
	layer.Annotations = map[string]string{"dev.cosignproject.cosign/signature": signature}
	d, err := l.addManifest(&c, layer)
	d.Annotations = map[string]string{"org.opencontainers.image.ref.name": "sha256-" + digest[len("sha256:"):] + ".sig",
		"kind": "dev.cosignproject.cosign/sigs"}
	return d, err
}
