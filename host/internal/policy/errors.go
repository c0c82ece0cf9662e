package policy

import (
	"errors"

	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Errors of opening a module. They are wrapped with the module's name and a remedy.
var (
	// ErrNotFound means that there is no such file and no embedded policy of that name.
	ErrNotFound = errors.New("policy: not found")
	// ErrBadModule means that the bytes are not a module that this host can run.
	ErrBadModule = sandbox.ErrBadModule
	// ErrGrant means that the module imports a function that it was not granted.
	ErrGrant = sandbox.ErrGrant
	// ErrCache means that the directory of compiled policies cannot be used, or not safely.
	ErrCache = sandbox.ErrCache
	// ErrSelfTest means that the module failed a small amount of its own work.
	ErrSelfTest = errors.New("policy: failed its self-test")
	// ErrArtefact means that a directory has an OCI image layout, but not that of a module.
	ErrArtefact = errors.New("policy: unusable artefact")
	// ErrDigest means that the module is not the one that the configuration pins.
	ErrDigest = errors.New("policy: wrong digest")
	// ErrSignature means that the configuration requires a signature, and the module has none by that key.
	ErrSignature = errors.New("policy: no valid signature")
)

// Errors of setting up a role.
var (
	// ErrRole means that the module does not have the requested role.
	ErrRole = errors.New("policy: module lacks the role")
	// ErrConfig means that a setting is unknown to the policy, has the wrong type, or was refused by it.
	ErrConfig = sandbox.ErrConfig
	// ErrMemory means that a limit of memory is reached, of one instance or of all.
	ErrMemory = sandbox.ErrMemory
)

// Errors of calls.
var (
	// ErrFault means that the guest trapped, returned a negative status, or gave an answer that breaks the contract.
	// The instance is dead; a [Fault] has the details.
	ErrFault = sandbox.ErrFault
	// ErrFuel means that the call needed more fuel than it was given. It comes in a [Fault].
	ErrFuel = sandbox.ErrFuel
	// ErrTime means that the call exceeded its limit of time, since sessions wait for it. It comes in a [Fault].
	ErrTime = sandbox.ErrTime
	// ErrQuarantine means that the module is not started any more: it failed too often, or once with [Stop].
	ErrQuarantine = errors.New("policy: in quarantine")
	// ErrClosed means that the role was closed.
	ErrClosed = sandbox.ErrClosed
	// ErrNamespace means that the namespace was not announced, or that its id is out of range.
	ErrNamespace = errors.New("policy: unknown namespace")
)

// Fault describes the failure of a guest call. It matches [ErrFault], and Cause if there is one.
type Fault = sandbox.Fault
