package transfer

import "time"

// SetWriteQueue changes [Config].WriteQueue for stores that come from now on.
func (e *Engine) SetWriteQueue(d time.Duration) { e.cfg.WriteQueue = d }

// ChangeByte is changeByte for the package's outside tests.
var ChangeByte = changeByte
