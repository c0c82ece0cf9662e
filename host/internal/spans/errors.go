package spans

import "errors"

var (
	// ErrEndpoint says that an address is no endpoint of a collector.
	ErrEndpoint = errors.New("no endpoint of a collector")
	// ErrHeaders says that a file of headers cannot be used.
	ErrHeaders = errors.New("headers")
)
