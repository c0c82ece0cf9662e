package policy

import "errors"

// Errors while a module is opened. They are wrapped with the module's name and with what to do.
var (
	// ErrNotFound: no such file, and no embedded policy of that name.
	ErrNotFound = errors.New("policy: not found")
	// ErrBadModule: the bytes are not a module that this host can run.
	ErrBadModule = errors.New("policy: bad module")
	// ErrGrant: the module imports something that it was not granted.
	ErrGrant = errors.New("policy: import not granted")
	// ErrCache: the directory of compiled policies cannot be used, or not safely.
	ErrCache = errors.New("policy: bad cache")
	// ErrCanary: the module could not do a little work that it was given to try out.
	ErrCanary = errors.New("policy: failed its trial")
	// ErrDigest: the module is not the one that the configuration pins.
	ErrDigest = errors.New("policy: wrong digest")
	// ErrSignature: the configuration wants a signature, and the module has none, or not one by that key.
	ErrSignature = errors.New("policy: no valid signature")
)

// Errors while a role is set up.
var (
	// ErrRole: the module does not have the role that was asked of it.
	ErrRole = errors.New("policy: module lacks the role")
	// ErrConfig: a setting is unknown to the policy, of the wrong type, or was refused by it.
	ErrConfig = errors.New("policy: bad setting")
)

// Errors of calls.
var (
	// ErrFault: the guest trapped, answered with a negative status, or gave an answer that breaks the contract. The
	// instance is gone; a [Fault] carries the details.
	ErrFault = errors.New("policy: fault")
	// ErrFuel: the call needed more fuel than it was given. It comes in a [Fault].
	ErrFuel = errors.New("policy: out of fuel")
	// ErrTime: the call took longer than sessions are made to wait for one. It comes in a [Fault].
	ErrTime = errors.New("policy: took too long")
	// ErrQuarantine: the module failed so often that it is not started any more, or once when a fault stops the host.
	ErrQuarantine = errors.New("policy: in quarantine")
	// ErrClosed: the role was closed.
	ErrClosed = errors.New("policy: closed")
	// ErrNamespace: the namespace was not announced, or its id is out of range.
	ErrNamespace = errors.New("policy: unknown namespace")
)
