package shared

import "errors"

// Errors of a member.
var (
	// ErrFenced means that the other hosts gave this one up, or that it left. It joins again by itself.
	ErrFenced = errors.New("shared: this host was given up by the others")
	// ErrCredit means that a piece was written without credit: no other host would know of its bytes.
	ErrCredit = errors.New("shared: no credit was taken")
	// ErrLinks means that the file system has no hard links: a root on it cannot be shared.
	ErrLinks = errors.New("shared: the file system has no hard links")
	// ErrDoubt means that nobody can tell yet whether a piece was published.
	ErrDoubt = errors.New("shared: it is in doubt whether the piece was published")
	// ErrDamaged means that a control file or a log record does not match its checksum.
	ErrDamaged = errors.New("shared: damaged control file")
	// ErrConfig means that the configuration is invalid.
	ErrConfig = errors.New("shared: bad configuration")
)
