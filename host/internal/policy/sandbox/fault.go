package sandbox

import (
	"fmt"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// Fault describes the failure of a guest call. It matches [ErrFault], and Cause if there is one.
type Fault struct {
	Module string
	Export string
	Status abi.Status // the guest's status, if it returned one
	Text   string     // the guest's own description: the text of its last call of fail, or of its standard error
	Reason string     // the host's description
	Cause  error
	Stack  string // the guest's call stack, if it trapped
}

func (f *Fault) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v: %s: %s: %s", ErrFault, f.Module, f.Export, f.Reason)
	if f.Text != "" {
		fmt.Fprintf(&b, ": %q", f.Text)
	}
	if f.Stack != "" {
		fmt.Fprintf(&b, " (guest stack: %s)", f.Stack)
	}
	return b.String()
}

// Unwrap makes errors.Is find ErrFault and the cause.
func (f *Fault) Unwrap() []error {
	if f.Cause == nil {
		return []error{ErrFault}
	}
	return []error{ErrFault, f.Cause}
}
