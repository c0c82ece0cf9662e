package faultfs

import "errors"

var (
	// ErrRule means that a fault rule cannot be parsed.
	ErrRule = errors.New("faultfs: bad fault rule")
	// ErrInjected is in every error that an [FS] injects, beside the errno of the rule.
	ErrInjected = errors.New("faultfs: injected fault")
)
