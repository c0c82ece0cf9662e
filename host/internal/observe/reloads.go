package observe

import (
	"sync/atomic"
	"time"
)

var (
	reloadOK = newFamily("config_last_reload_successful", "1 if the last reload of the configuration was applied, or there was none.", "")
	reloadAt = newFamily("config_last_reload_success_timestamp_seconds", "When a configuration was applied last; 0: at the start.", "")

	certificateEnd = newFamily("certificate_expiry_timestamp_seconds", "When the certificate that a setting names ends.", "setting")
)

// Reloads counts the results of reloads.
type Reloads struct {
	failed  atomic.Bool // the last reload failed
	applied atomic.Int64
}

func (r *Reloads) Observe(ok bool, now time.Time) {
	if ok {
		r.applied.Store(now.Unix())
	}
	r.failed.Store(!ok)
}

func (r *Reloads) collect(out series) {
	out.put(reloadOK, boolean(!r.failed.Load()))
	out.put(reloadAt, float64(r.applied.Load()))
}
