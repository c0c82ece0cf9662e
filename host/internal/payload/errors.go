package payload

import "errors"

// ErrDType means that there is no content for this type.
var ErrDType = errors.New("payload: unknown content of pages")
