package codec

import "errors"

// ErrCorrupt is returned for stored bytes that no extent was encoded to.
var ErrCorrupt = errors.New("codec: corrupt stored extent")
