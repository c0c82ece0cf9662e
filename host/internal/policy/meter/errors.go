package meter

import "errors"

// Reasons to refuse a module. They are wrapped with the place and the detail.
var (
	// ErrMalformed means that the bytes are not a module that this package can parse.
	ErrMalformed = errors.New("meter: malformed module")
	// ErrOpcode means that an instruction is outside the accepted set.
	ErrOpcode = errors.New("meter: unknown instruction")
	// ErrReserved means that the module uses a name that the meter needs.
	ErrReserved = errors.New("meter: reserved name")
	// ErrStart means that the module has a start section, which would run before it can be charged.
	ErrStart = errors.New("meter: start section")
	// ErrLimit means that a count or size exceeds its limit.
	ErrLimit = errors.New("meter: limit exceeded")
)
