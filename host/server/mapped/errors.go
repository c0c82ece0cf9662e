package mapped

import "errors"

var (
	// ErrFile says that a file cannot be mapped.
	ErrFile = errors.New("mapped: file refused")
	// ErrUnprotected says that a mapping would allocate pages, because the kernel gives this process no userfaultfd.
	ErrUnprotected = errors.New("mapped: missing pages cannot be refused")
)
