package slots

import "runtime/debug"

// A collection in a guest takes fuel and time from the event that happens to start it, and finds nothing: pages are
// kept until the instance ends, and policies allocate nothing else after their start.
func init() { debug.SetGCPercent(-1) }
