package compiler

import "errors"

var (
	// ErrLimit means that a module took more memory or time to compile than it may.
	ErrLimit = errors.New("compiling took too much")
	// ErrCompiler means that the compiler failed, by itself or because of the module.
	ErrCompiler = errors.New("compiler failed")
	// ErrNotCached means that the machine code of a module is not in the cache, or cannot be used.
	ErrNotCached = errors.New("machine code not cached")
)
