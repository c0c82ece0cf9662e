package minisign

import "errors"

var (
	// ErrFormat means that the text is not a key or a signature of minisign.
	ErrFormat = errors.New("minisign: bad format")
	// ErrEncrypted means that the secret key has a password.
	ErrEncrypted = errors.New("minisign: the secret key has a password; make one without (minisign -G -W)")
	// ErrKey means that the signature was made with another key.
	ErrKey = errors.New("minisign: another key")
	// ErrSignature means that the signature does not match the bytes and the key.
	ErrSignature = errors.New("minisign: wrong signature")
)
