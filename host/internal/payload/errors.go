package payload

import "errors"

// ErrDType: there is no such content.
var ErrDType = errors.New("payload: unknown content of pages")
