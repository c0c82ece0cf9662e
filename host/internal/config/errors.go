package config

import "errors"

// Errors of this package. They are wrapped with the key, and with the file and line, the variable or the flag.
var (
	// ErrFile means that the configuration file cannot be read or is not TOML.
	ErrFile = errors.New("config: bad file")
	// ErrKey means that a key is not known.
	ErrKey = errors.New("config: unknown key")
	// ErrValue means that a value has the wrong type or is not allowed for its key.
	ErrValue = errors.New("config: bad value")
)
