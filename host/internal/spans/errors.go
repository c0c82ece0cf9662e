package spans

import "errors"

var (
	// ErrEndpoint means that an address is not an endpoint of a collector.
	ErrEndpoint = errors.New("no endpoint of a collector")
	// ErrHeaders means that a file of headers cannot be used.
	ErrHeaders = errors.New("headers")
)
