package gds

import (
	"golang.org/x/sys/unix"
)

// bindCPUs keeps the calling thread, which is locked to its goroutine, on the GPU's CPUs. If a container forbids
// those CPUs, the thread stays where it is: the binding only improves speed.
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
		g.driver.log.Debug("cannot bind a GPU thread to CPUs near it", "gpu", g.UUID.String(), "error", err)
		return
	}
	t.bound = true
}

func (t *Thread) unbindCPUs() {
	if t.bound {
		_ = unix.SchedSetaffinity(0, &t.affinity) // an error only costs speed
		t.bound = false
	}
}
