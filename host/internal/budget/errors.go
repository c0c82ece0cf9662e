package budget

import (
	"errors"
	"fmt"
)

var (
	// ErrShare means that a holder already has as much as it may have now.
	ErrShare = errors.New("budget: share is used up")
	// ErrHolders means that the number of holders is at its limit.
	ErrHolders = errors.New("budget: too many holders")
	// ErrConfig means that the budget is too small to be divided.
	ErrConfig = errors.New("budget: too small")
)

// Refusal is the error for a holder that gets no more. It names the holder's own figures only, because a client must
// not learn about others.
type Refusal struct {
	Of           string // name of the resource
	Holder       string
	Wanted, Held int64
	May          int64 // amount that the holder may have now
	Advice       string
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("%s: %d more wanted, %s holds %d of the %d that it may hold now: %s", r.Of, r.Wanted, r.Holder, r.Held,
		r.May, r.Advice)
}

func (r *Refusal) Unwrap() error { return ErrShare }
