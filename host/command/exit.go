package command

import (
	"errors"
	"slices"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/fsck"
	"github.com/kvhost/kvhost/host/internal/trace"
)

// Exit codes. They are part of the command's contract and are listed by --help-all. 1 and 2 are left to Go's runtime,
// which ends a crashed process with 2. A service manager must be able to distinguish a crash from wrong usage, which no
// restart corrects.
const (
	exitOK       = 0
	exitRootBusy = 3
	exitAddress  = 4
	exitPolicy   = 5
	exitTrace    = 6
	exitMismatch = 7
	exitProblems = 8
	exitCheck    = 9
	exitGPU      = 10
	exitFailure  = 11
	exitUsage    = 12
)

const exitHelp = `Exit codes:
  0  success
  2  kvhost crashed (1 and 2 are those of Go's runtime): please report what is on standard error
  3  a root is in use by another host
  4  the socket, the HTTP address or that of peers is in use
  5  a policy was refused: not found, not a module, lacking its role, or failing at its start
  6  a trace cannot be read: missing, damaged, truncated, or not a trace
  7  wrong bytes were served (replay)
  8  a root has problems that remain (fsck)
  9  a host would start, and something configured cannot work on this machine (check, which else has the code of the start)
 10  a GPU failed while kvhost ran; only a new process can use it again
 11  failure: the reason is on standard error
 12  wrong usage or configuration`

// errUsage marks errors in flags and arguments.
var errUsage = errors.New("usage")

// usageError is an error in flags or arguments.
type usageError struct{ error }

func (usageError) Is(target error) bool { return target == errUsage }

func exitCode(err error) int {
	is := func(targets ...error) bool {
		return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
	}
	switch {
	case err == nil:
		return exitOK
	case is(replay.ErrMismatch):
		return exitMismatch
	case is(fsck.ErrProblems):
		return exitProblems
	case is(doctor.ErrProblems):
		return exitCheck
	case is(store.ErrRootBusy):
		return exitRootBusy
	case is(socket.ErrInUse, observe.ErrHTTP, peers.ErrListen):
		return exitAddress
	case is(sandbox.ErrCompiler): // the compiler may have been killed for lack of memory, and a restart may help
		return exitFailure
	case is(policyset.ErrPolicy, policyset.ErrRole, policy.ErrNotFound, policy.ErrBadModule, policy.ErrGrant,
		policy.ErrDigest, policy.ErrCache, policy.ErrRole, policy.ErrConfig, policy.ErrFault, policy.ErrSignature, errFindings):
		return exitPolicy
	case is(gds.ErrLost):
		return exitGPU
	case is(trace.ErrFormat, trace.ErrBounds, trace.ErrInput, trace.ErrOpen):
		return exitTrace
	case is(errUsage, observe.ErrCredential, config.ErrFile, config.ErrKey, config.ErrValue, replay.ErrOptions,
		store.ErrConfig, peers.ErrConfig):
		return exitUsage
	}
	return exitFailure
}
