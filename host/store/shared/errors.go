package shared

import "errors"

// What a member cannot do just now, or here.
var (
	// ErrFenced says that the others gave this host up, or that it left; it joins again by itself.
	ErrFenced = errors.New("shared: this host was given up by the others")
	// ErrCredit is a piece that was written without credit: nobody else would know of its bytes.
	ErrCredit = errors.New("shared: no credit was taken")
	// ErrLinks is a file system without hard links: a root on it cannot be shared.
	ErrLinks = errors.New("shared: the file system has no hard links")
	// ErrDamaged is a control file or a log record that is not what was written.
	ErrDamaged = errors.New("shared: damaged control file")
	// ErrConfig is a configuration that cannot be.
	ErrConfig = errors.New("shared: bad configuration")
)
