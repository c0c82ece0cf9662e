package minisign

import "errors"

var (
	// ErrFormat: the text is not a key or a signature of minisign.
	ErrFormat = errors.New("minisign: bad format")
	// ErrEncrypted: the secret key has a password.
	ErrEncrypted = errors.New("minisign: the secret key has a password; make one without (minisign -G -W)")
	// ErrKey: the signature was made with another key.
	ErrKey = errors.New("minisign: another key")
	// ErrSignature: the signature is not one of these bytes by this key.
	ErrSignature = errors.New("minisign: wrong signature")
)
