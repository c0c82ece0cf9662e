package proto

import "errors"

// ErrMessage means that a message cannot be decoded. It is wrapped with the field's name.
var ErrMessage = errors.New("proto: bad message")
