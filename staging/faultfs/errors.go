package faultfs

import (
	"errors"
	"fmt"
)

var (
	// ErrRule means that a fault rule cannot be parsed.
	ErrRule = errors.New("faultfs: bad fault rule")
	// ErrInjected is in every error that an [FS] injects, next to the errno of the rule.
	ErrInjected = errors.New("faultfs: injected fault")
	// ErrPowerLost is returned by every operation after [Machine.PowerLoss]. It wraps [ErrInjected].
	ErrPowerLost = fmt.Errorf("faultfs: power lost (%w)", ErrInjected)
)
