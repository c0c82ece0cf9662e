package proto

import "errors"

// ErrMessage refuses a message that cannot be decoded; it is wrapped with the field's name.
var ErrMessage = errors.New("proto: bad message")
