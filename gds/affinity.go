package gds

import (
	"golang.org/x/sys/unix"
)

// stay keeps the calling thread, which is locked to its goroutine, on the CPUs that the GPU was given. A thread that
// may not be there, by its container's bounds, stays where it is: near is quicker, and nothing more.
func (t *Thread) bindCPUs(g *GPU) {
	if len(g.cfg.CPUs) == 0 || unix.SchedGetaffinity(0, &t.affinity) != nil {
		return
	}
	var near unix.CPUSet
	for _, cpu := range g.cfg.CPUs {
		if t.affinity.IsSet(cpu) {
			near.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &near); err != nil {
		g.driver.log.Debug("a thread of a GPU is not kept near it", "gpu", g.UUID.String(), "error", err)
		return
	}
	t.bound = true
}

// roam undoes stay.
func (t *Thread) unbindCPUs() {
	if t.bound {
		_ = unix.SchedSetaffinity(0, &t.affinity) // as it was
		t.bound = false
	}
}
