package trace

import "errors"

// Errors of this package. They are wrapped with the trace's name and line.
var (
	// ErrFormat means that a line is not a request.
	ErrFormat = errors.New("trace: not a request")
	// ErrBounds means that a line or a list of ids is longer than the limit.
	ErrBounds = errors.New("trace: too long")
	// ErrOpen means that the file cannot be opened.
	ErrOpen = errors.New("trace: cannot open")
	// ErrInput means that the input ends early, is damaged, or cannot be read. The requests before that point were returned.
	ErrInput = errors.New("trace: input ends early or is damaged")
)
