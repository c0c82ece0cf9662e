package metamorphic

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"

	"github.com/kvhost/kvhost/abi"
)

// runRush lets clients work at the same time, beside a change of policy, and looks at the disk meanwhile.
func (n operator) runRush(op Op) (string, error) {
	for _, o := range n.r.nodes {
		if o.store == nil {
			return "a host is closed", nil
		}
	}
	n.letGo()
	stop := make(chan struct{})
	var watch, clients sync.WaitGroup
	watch.Go(func() { n.watchDisk(stop) })
	for text := range strings.SplitSeq(op.get("clients"), "+") {
		id, _, _ := strings.Cut(text, ":")
		_, seed, _ := parsePair("0" + strings.TrimPrefix(text, id))
		if i := n.r.h.host(id); i >= 0 {
			clients.Go(func() { n.r.nodes[i].client(rand.New(rand.NewPCG(seed, 2))) })
		}
	}
	clients.Go(func() {
		if _, err := n.swap(abi.RoleEvict, op.get("swap")); err != nil {
			n.r.report(fmt.Errorf("host %s: changing the evict policy: %w", n.ID, err))
		}
	})
	clients.Wait()
	close(stop)
	watch.Wait()
	return "", nil
}

// watchDisk checks that roots keep within their capacity, and lets hosts make steps, until it is stopped.
func (n *node) watchDisk(stop <-chan struct{}) {
	for {
		for i, root := range n.cfg.Roots {
			disk, err := n.r.frozenDisk(i)
			if err == nil && disk > root.Capacity {
				err = fmt.Errorf("root %d: %d bytes on disk, of %d", i, disk, root.Capacity)
			}
			if err != nil {
				n.r.report(err)
				return
			}
		}
		select {
		case <-stop:
			return
		default:
		}
		if n.r.h.Kind.hosts > 1 {
			n.turn()
		}
	}
}

// client stores, loads and gives up at random.
func (n *node) client(rng *rand.Rand) {
	g := &generator{rng: rng}
	for range 30 {
		switch k := rng.IntN(10); {
		case k < 5:
			n.storeEntry(g.entry())
		case k < 6:
			if _, err := n.discard(g.entry(), 2); err != nil {
				n.r.report(err)
			}
		case k < 9:
			l, err := n.lookup(g.entry(), 3, 0)
			if err != nil {
				n.r.report(err)
				return
			}
			n.loadAll(l, g.ranks(3))
			l.Release()
		default:
			if p, err := n.begin(g.piece()); err == nil {
				_ = p.write() // it is given up all the same
				p.Abort(errAborted)
			}
		}
	}
}
