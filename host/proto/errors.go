package proto

import "errors"

// ErrMessage refuses a message that cannot be read as what it claims to be; wrapped with the field's name.
var ErrMessage = errors.New("proto: bad message")
