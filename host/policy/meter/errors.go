package meter

import "errors"

// Why a module is refused; wrapped with where and what.
var (
	// ErrMalformed says the bytes are not a module this package can walk.
	ErrMalformed = errors.New("meter: malformed module")
	// ErrOpcode says an instruction is outside the accepted set.
	ErrOpcode = errors.New("meter: unknown instruction")
	// ErrReserved says the module uses the name that the meter needs.
	ErrReserved = errors.New("meter: reserved name")
	// ErrStart says the module has a start section, which would run before it can be charged.
	ErrStart = errors.New("meter: start section")
	// ErrLimit says a count or size is over its limit.
	ErrLimit = errors.New("meter: limit exceeded")
)
