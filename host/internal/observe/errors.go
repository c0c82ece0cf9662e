package observe

import "errors"

var (
	// ErrHTTP means that the address cannot be listened on, or that the listener failed.
	ErrHTTP = errors.New("http listener")
	// ErrCredential means that the certificate or the token cannot be used.
	ErrCredential = errors.New("http credential")
)
