package codec

import "errors"

// ErrCorrupt means that stored bytes are not the encoded form of any extent.
var ErrCorrupt = errors.New("codec: corrupt stored extent")
