package slots

import "runtime/debug"

// Garbage collection is off. In a guest it would take fuel and time from the event that happens to start it, and it
// would find nothing: pages are kept until the instance ends, and policies allocate nothing else after their start.
func init() { debug.SetGCPercent(-1) }
