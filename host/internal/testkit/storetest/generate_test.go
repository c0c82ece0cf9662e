package storetest

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// numKeys is how many keys a namespace of a history has: more than fit its roots.
const numKeys = 24

// Generate makes the history of a seed, of the kind that the seed stands for. It has about so many operations.
func Generate(seed uint64, operations int) *History {
	return GenerateKind(kinds[seed%uint64(len(kinds))], seed, operations)
}

// GenerateKind makes the history of a seed and a kind.
func GenerateKind(kind Kind, seed uint64, operations int) *History {
	g := &generator{rng: rand.New(rand.NewPCG(seed, 1)), h: &History{Kind: kind, Seed: seed}}
	if n := strings.Count(kind.faults, "%d"); n > 0 {
		seeds := make([]any, n)
		for i := range seeds {
			seeds[i] = g.rng.Uint64N(1 << 32)
		}
		rules := strings.TrimSpace(fmt.Sprintf(kind.faults, seeds...))
		g.h.Faults = strings.Split(rules, "\n")
	}
	for i := range kind.hosts {
		host := Host{ID: string(rune('a' + i)), Strict: g.rng.IntN(2) == 0}
		g.h.Hosts = append(g.h.Hosts, host)
		g.hosts = append(g.hosts, &plan{Host: host})
	}
	g.h.Copies = kind.hosts > 1 && g.rng.IntN(2) == 0
	if kind.lives {
		g.lives(operations)
	} else {
		g.mixture(operations)
	}
	for _, p := range g.hosts {
		g.add(p, "Finish", g.policies()...)
	}
	return g.h
}

// generator draws operations.
type generator struct {
	rng *rand.Rand
	h   *History
	// handles is the last number that was given to a put or a lease.
	handles int
	hosts   []*plan
}

// plan is what the generator knows of a host: which puts and leases there are, if all goes well.
type plan struct {
	Host
	puts, leases []int
}

func (g *generator) add(p *plan, verb string, args ...any) {
	g.h.Ops = append(g.h.Ops, newOp(p.ID, verb, args...))
}

func (g *generator) open(p *plan) {
	p.puts, p.leases = nil, nil
	g.add(p, "Open", g.policies()...)
}

// draft adds the operations of one thing that happens to a host.
type draft struct {
	weight int
	add    func(g *generator, p *plan)
}

// mixture draws operations that each have a weight. The weights differ between histories: some do much of one thing.
func (g *generator) mixture(operations int) {
	for _, p := range g.hosts {
		g.open(p)
	}
	drafts := g.drafts()
	total := 0
	for _, d := range drafts {
		total += d.weight
	}
	for len(g.h.Ops) < operations {
		p := g.hosts[g.rng.IntN(len(g.hosts))]
		n := g.rng.IntN(total)
		for _, d := range drafts {
			if n -= d.weight; n < 0 {
				d.add(g, p)
				break
			}
		}
	}
}

func (g *generator) drafts() []draft {
	list := []draft{
		{40, func(g *generator, p *plan) { g.add(p, "Store", "entry", g.entry()) }},
		{30, (*generator).lookup},
		{6, (*generator).begin},
		{6, (*generator).finish},
		{8, (*generator).release},
		{8, func(g *generator, p *plan) { g.add(p, "Discard", "entry", g.entry(), "n", 1+g.rng.IntN(3)) }},
		{2, func(g *generator, p *plan) { g.add(p, "EndRequest") }},
		{3, (*generator).maintain},
		{2, func(g *generator, p *plan) { g.add(p, "Close"); g.open(p) }},
		{2, (*generator).kill},
		{3, func(g *generator, p *plan) { g.add(p, "Swap", "role", "evict", "policy", g.evictor()) }},
		{1, func(g *generator, p *plan) {
			g.add(p, "Swap", "role", "layout", "policy", []string{"built-in", "blocks"}[g.rng.IntN(2)])
		}},
		{1, func(g *generator, p *plan) {
			g.add(p, "Swap", "role", "admit", "policy", []string{"all", "some"}[g.rng.IntN(2)])
		}},
	}
	if g.h.Kind.power { // the machine must see every change of the disk
		list = append(list, draft{3, func(g *generator, p *plan) {
			g.add(p, "PowerLoss", "seed", g.rng.Uint64())
			g.open(p)
		}})
	} else {
		list = append(list, draft{3, (*generator).damage})
	}
	if g.places() {
		list = append(list, draft{2, func(g *generator, p *plan) {
			g.add(p, "Swap", "role", "place", "policy", g.placer())
		}})
	}
	if g.h.Kind.hosts > 1 {
		list = append(list,
			draft{30, func(g *generator, p *plan) { g.add(p, "Turns", "n", 1+g.rng.IntN(4)) }},
			draft{2, func(g *generator, p *plan) { g.add(p, "Sleep", "n", 1+g.rng.IntN(30)) }})
	}
	if g.h.Kind.pauses {
		list = append(list, draft{12, (*generator).pause})
	}
	if g.h.Kind.many {
		list = append(list, draft{5, (*generator).rush})
	}
	for i := range list {
		list[i].weight = max(1, list[i].weight*[]int{1, 2, 2, 2, 6}[g.rng.IntN(5)]/2)
	}
	return list
}

func (g *generator) entry() Entry {
	space := 0
	if g.rng.IntN(4) == 0 {
		space = 1
	}
	return Entry{space, g.rng.Uint64N(numKeys)}
}

func (g *generator) piece() Piece { return Piece{g.entry(), uint32(g.rng.IntN(2))} }

// ranks draws which rank of each of n hits is loaded.
func (g *generator) ranks(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte('0' + g.rng.IntN(2))
	}
	return string(b)
}

func (g *generator) handle() int {
	g.handles++
	return g.handles
}

// pick takes one of a host's handles out of its list.
func (g *generator) pick(list *[]int) int {
	i := g.rng.IntN(len(*list))
	n := (*list)[i]
	*list = append((*list)[:i], (*list)[i+1:]...)
	return n
}

func (g *generator) begin(p *plan) {
	n := g.handle()
	p.puts = append(p.puts, n)
	g.add(p, "Begin", "put", n, "piece", g.piece())
}

func (g *generator) finish(p *plan) {
	if len(p.puts) == 0 {
		return
	}
	n := g.pick(&p.puts)
	if g.rng.IntN(3) > 0 {
		g.add(p, "Publish", "put", n)
	} else {
		g.add(p, "Abort", "put", n, "written", g.rng.IntN(2) == 0)
	}
}

func (g *generator) lookup(p *plan) {
	const n = 4
	args := []any{"entry", g.entry(), "n", n, "ranks", g.ranks(n)}
	if g.rng.IntN(3) == 0 && len(p.leases) < 4 {
		lease := g.handle()
		p.leases = append(p.leases, lease)
		args = append(args, "hold", lease)
	}
	g.add(p, "Lookup", args...)
}

func (g *generator) release(p *plan) {
	if len(p.leases) == 0 {
		return
	}
	args := []any{"lease", g.pick(&p.leases)}
	if g.rng.IntN(2) == 0 {
		args = append(args, "ranks", g.ranks(4)) // what a lease is on stays
	}
	g.add(p, "Release", args...)
}

func (g *generator) maintain(p *plan) {
	for root := range g.h.Kind.roots {
		g.add(p, "Maintain", "root", root, "task", []string{"retry", "probe"}[g.rng.IntN(2)])
	}
}

// kill ends a host between two operations, or at some call of the next few.
func (g *generator) kill(p *plan) {
	if g.rng.IntN(3) > 0 {
		g.add(p, "Arm", "call", 1+g.rng.Uint64N(60))
		for range 6 {
			if g.rng.IntN(3) == 0 {
				g.begin(p)
			} else {
				g.add(p, "Store", "entry", g.entry())
			}
		}
	}
	g.add(p, "Crash")
	g.open(p)
}

func (g *generator) damage(p *plan) {
	how := []string{"remove", "cut", "flip", "flip"}[g.rng.IntN(4)]
	g.add(p, "Damage", "file", g.rng.IntN(1<<16), "how", how, "at", g.rng.IntN(pieceBytes), "bytes", g.rng.Uint32())
}

// pause stops a host at some operation of a store or of a step, mostly for longer than the lapse.
func (g *generator) pause(p *plan) {
	var fill []string
	for range g.rng.IntN(40) {
		fill = append(fill, g.entry().String())
	}
	g.add(p, "Pause", "entry", g.entry(), "step", g.rng.IntN(4) == 0, "call", 1+g.rng.Uint64N(30),
		"asleep", g.rng.IntN(2)*10+g.rng.IntN(10), "awake", g.rng.IntN(2)*g.rng.IntN(8),
		"fill", strings.Join(append(fill, g.entry().String()), "+"))
}

func (g *generator) rush(p *plan) {
	p.puts, p.leases = nil, nil
	var clients []string
	for range 4 {
		who := g.hosts[g.rng.IntN(len(g.hosts))]
		clients = append(clients, fmt.Sprintf("%s:%d", who.ID, g.rng.Uint64()))
	}
	g.add(p, "Rush", "clients", strings.Join(clients, "+"), "swap", g.evictor())
}

// evictors are the evict policies of histories: modules and their native twins, one that hands its state over, and some
// that misbehave.
var evictors = []string{"lru", "fifo", "native-lru", "native-fifo", "replaying", "liar", "miser", "wrecker"}

func (g *generator) evictor() string {
	return fmt.Sprintf("%s:%d", evictors[g.rng.IntN(len(evictors))], g.rng.Uint64())
}

// placers are policies that follow the key, and rogues: see roguePlacer.
var placers = []string{"1/1/1", "4/4", "2/2", "collider", "mute", "fickle", "thief"}

// places says whether there are place policies.
func (g *generator) places() bool { return g.h.Kind.hosts == 1 || g.h.Copies }

// placer draws no collider where power is lost: a file that is damaged under a name that no policy can read back is a
// foreign file to a scan, which leaves it alone and does not count it.
func (g *generator) placer() string {
	for {
		if name := placers[g.rng.IntN(len(placers))]; name != "collider" || !g.h.Kind.power {
			return name
		}
	}
}

// policies draws those of a host's next life.
func (g *generator) policies() (args []any) {
	if g.h.Kind.lives {
		return nil
	}
	if g.rng.IntN(2) == 0 {
		args = append(args, "evict", g.evictor())
	}
	if g.places() && g.rng.IntN(2) == 0 {
		args = append(args, "place", g.placer())
	}
	return args
}

// lives draws lives of one host that end when the power is lost or the process is killed, mostly in the middle of an
// operation, also while the store opens or closes.
func (g *generator) lives(operations int) {
	const stores = 60
	p := g.hosts[0]
	for life := 0; len(g.h.Ops) < operations; life++ {
		if life > 0 && g.rng.IntN(4) == 0 { // while the last crash is being recovered from
			g.add(p, "Open", "unplug", g.unplug(40))
		} else {
			g.add(p, "Open")
		}
		end := []string{"outage", "outage", "close", "kill"}[g.rng.IntN(4)]
		if strikes := g.rng.IntN(4) > 0; strikes && end == "outage" {
			g.add(p, "Arm", "call", 1+g.rng.Uint64N(600), "power", true, "seed", g.rng.Uint64())
		} else if strikes && end == "kill" {
			g.add(p, "Arm", "call", 1+g.rng.Uint64N(600))
		}
		for range stores {
			g.add(p, "Store", "entry", Entry{0, g.rng.Uint64N(numKeys)})
		}
		switch {
		case end == "kill":
			g.add(p, "Crash")
			continue // the machine stays up
		case end == "close" && g.rng.IntN(2) == 0:
			g.add(p, "Close", "unplug", g.unplug(30))
		case end == "close":
			g.add(p, "Close")
		}
		g.add(p, "PowerLoss", "seed", g.rng.Uint64())
	}
	g.add(p, "PowerLoss", "seed", g.rng.Uint64())
}

// unplug draws one of the next n calls, at which the power is lost.
func (g *generator) unplug(n uint64) string {
	return fmt.Sprintf("%d:%d", 1+g.rng.Uint64N(n), g.rng.Uint64())
}
