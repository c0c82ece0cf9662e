package sandbox

import "errors"

// Errors of loading a module.
var (
	// ErrBadModule means that the bytes are not a module that this host can run.
	ErrBadModule = errors.New("policy: bad module")
	// ErrGrant means that the module imports a function that it was not granted.
	ErrGrant = errors.New("policy: import not granted")
	// ErrCache means that the directory of compiled policies cannot be used, or not safely.
	ErrCache = errors.New("policy: bad cache")
	// ErrMemory means that a limit of memory is reached, of one instance or of all.
	ErrMemory = errors.New("policy: no memory")
	// ErrConfig means that a setting is unknown to the policy, has the wrong type, or was refused by it.
	ErrConfig = errors.New("policy: bad setting")
)

// Errors of compiling.
var (
	// ErrLimit means that compiling a module exceeded a limit of memory or time.
	ErrLimit = errors.New("compiling took too much")
	// ErrCompiler means that the compiler failed, with or without the module's fault.
	ErrCompiler = errors.New("compiler failed")
	// errNotCached means that the machine code of a module is not in the cache, or cannot be used.
	errNotCached = errors.New("machine code not cached")
)

// Errors of calls.
var (
	// ErrFault means that the guest trapped, returned a negative status, or gave an answer that breaks the contract.
	// The instance is dead; a [Fault] has the details.
	ErrFault = errors.New("policy: fault")
	// ErrFuel means that the call needed more fuel than it was given. It comes in a [Fault].
	ErrFuel = errors.New("policy: out of fuel")
	// ErrTime means that the call exceeded its limit of time, since sessions wait for it. It comes in a [Fault].
	ErrTime = errors.New("policy: took too long")
	// errStack means that the call nested too deeply. It comes in a [Fault].
	errStack = errors.New("policy: stack too large")
	// ErrClosed means that the instance or the role was closed.
	ErrClosed = errors.New("policy: closed")
)
