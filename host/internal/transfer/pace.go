package transfer

import (
	"maps"
	"slices"
)

// pace registers a load that waits for its consumer, so that Close can end it.
func (e *Engine) pace(l *layered) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.paced[l] = struct{}{}
}

func (e *Engine) unpace(l *layered) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.paced, l)
}

// releasePaced ends the loads that still wait. The workers are closed by then.
func (e *Engine) releasePaced() {
	e.mu.Lock()
	loads := slices.Collect(maps.Keys(e.paced))
	e.mu.Unlock()
	for _, l := range loads {
		l.submitDue()
	}
}
