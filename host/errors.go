package host

import "errors"

// ErrHTTP means that the HTTP listener failed. Errors of policies are those of package policyset.
var ErrHTTP = errors.New("host: http listener")
