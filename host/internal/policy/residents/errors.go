package residents

import "errors"

// ErrEvents means that a sequence of events breaks the contract between a host and an evict policy.
var ErrEvents = errors.New("residents: events break the contract")
