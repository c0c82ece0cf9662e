package config

import "errors"

// Errors of this package; wrapped with the file and line, the variable or the flag, and the key.
var (
	// ErrFile: the configuration file cannot be read or is not TOML.
	ErrFile = errors.New("config: bad file")
	// ErrKey: a key that is not known.
	ErrKey = errors.New("config: unknown key")
	// ErrValue: a value of the wrong type, or one that its key does not take.
	ErrValue = errors.New("config: bad value")
)
