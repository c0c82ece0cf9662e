package budget

import (
	"errors"
	"fmt"
)

var (
	// ErrShare says that a holder has as much as it may have now.
	ErrShare = errors.New("budget: share is used up")
	// ErrHolders says that there are as many holders as there may be.
	ErrHolders = errors.New("budget: too many holders")
	// ErrConfig says that the budget is too small to be divided.
	ErrConfig = errors.New("budget: too small")
)

// Refusal is why a holder gets no more. It names the holder's own figures only, because a client must not learn what
// others do.
type Refusal struct {
	Of           string // what the budget is of
	Holder       string
	Wanted, Held int64
	May          int64 // that the holder may hold now
	Advice       string
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("%s: %d more wanted, %s holds %d of the %d that it may hold now: %s", r.Of, r.Wanted, r.Holder, r.Held,
		r.May, r.Advice)
}

func (r *Refusal) Unwrap() error { return ErrShare }
