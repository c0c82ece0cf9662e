package sim

import (
	"context"
	"fmt"
	"io"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// mostHosts is how many bits say which hosts have a chunk.
const mostHosts = 64

// Deal is how requests come to hosts.
type Deal struct {
	text  string
	moves float64 // the part of requests that go to any host; the others to where their conversation was last
}

func (d Deal) String() string { return d.text }

// ParseDeal reads "random", "sticky" (a tenth of a conversation's requests move) or "sticky:20%".
func ParseDeal(text string) (Deal, error) {
	kind, share, given := strings.Cut(text, ":")
	d := Deal{text: text, moves: 0.1}
	percent, err := strconv.ParseFloat(strings.TrimSuffix(share, "%"), 64)
	switch {
	case text == "random":
		d.moves = 1
	case kind != "sticky" || given && (err != nil || !strings.HasSuffix(share, "%") || !(percent >= 0 && percent <= 100)):
		return d, fmt.Errorf("%w: deal %q: want random, sticky, or the part that moves as in sticky:20%%", ErrHosts, text)
	case given:
		d.moves = percent / 100
	}
	return d, nil
}

// HostsResult is what hosts with one policy do on one workload.
type HostsResult struct {
	Trace          string  `json:"trace"`
	Policy         string  `json:"policy"`
	Admit          string  `json:"admit"`
	Deal           string  `json:"deal"`
	Hosts          int     `json:"hosts"`
	Capacity       int     `json:"capacity"` // chunks of all hosts together
	Accesses       int     `json:"accesses"`
	PrefixHits     int     `json:"prefix_hits"` // contiguous from a request's start: these are loaded
	PrefixHitRatio float64 `json:"prefix_hit_ratio"`
	OneHostRatio   float64 `json:"one_host_prefix_hit_ratio"` // of one host with the capacity of all
	BesideOneHost  float64 `json:"beside_one_host"`
	RemoteHits     int     `json:"remote_hits"` // of PrefixHits, those that another host has lent
	Copies         float64 `json:"copies"`      // of a chunk, mean over all requests
	MostCopies     int     `json:"most_copies"` // that a chunk ever had
	Promotions     int     `json:"promotions"`  // copies of what was lent
	Demotions      int     `json:"demotions"`   // to other hosts
	Refused        int     `json:"refused"`     // new chunks that the admit policy did not want
	BytesSent      []int64 `json:"bytes_sent"`  // by host
}

// HostsGrid is every policy with every admission, deal and capacity, on every workload.
type HostsGrid struct {
	Grid
	Admissions []*Policy
	Deals      []Deal
	Hosts      int
}

// rows are the runs at one capacity.
func (g *HostsGrid) rows() int { return len(g.Policies) * len(g.Admissions) * len(g.Deals) }

// Accesses is the number of accesses of all runs together, those of one host among them.
func (g *HostsGrid) Accesses() int64 {
	return g.Grid.Accesses() * int64(1+len(g.Admissions)*len(g.Deals))
}

// HostsOutcome is a grid's results, by workload, then capacity, policy, admission and deal.
type HostsOutcome struct {
	Results []HostsResult
	grid    *HostsGrid
}

// Run does all runs.
func (g *HostsGrid) Run(ctx context.Context) (*HostsOutcome, error) {
	if g.Hosts < 2 || g.Hosts > mostHosts {
		return nil, fmt.Errorf("%w: %d, want 2 to %d", ErrHosts, g.Hosts, mostHosts)
	}
	for _, p := range g.Policies {
		if p.module == nil {
			return nil, fmt.Errorf("%w: %s knows the future or needs no room, and is no host's", ErrPolicy, p.Text)
		}
	}
	variants := len(g.Admissions) * len(g.Deals)
	cells := len(g.Workloads) * len(g.Capacities) * len(g.Policies)
	ones, err := runAll(ctx, g.Parallel, cells, func(ctx context.Context, i int) (Result, error) {
		w, size, p := g.cell(i)
		each, err := g.each(w, size)
		if err != nil {
			return Result{}, err
		}
		return p.run(ctx, w, each*g.Hosts, g.Options)
	})
	if err != nil {
		return nil, err
	}
	results, err := runAll(ctx, g.Parallel, cells*variants, func(ctx context.Context, i int) (HostsResult, error) {
		return g.run(ctx, i/variants, g.Admissions[i%variants/len(g.Deals)], g.Deals[i%len(g.Deals)], ones[i/variants].PrefixHitRatio)
	})
	return &HostsOutcome{results, g}, err
}

// cell is what the runs with each admission and deal have in common with one of one host.
func (g *HostsGrid) cell(i int) (*Workload, Capacity, *Policy) {
	n := len(g.Policies)
	return g.Workloads[i/n/len(g.Capacities)], g.Capacities[i/n%len(g.Capacities)], g.Policies[i%n]
}

// each is the chunks that one of the hosts has room for.
func (g *HostsGrid) each(w *Workload, size Capacity) (each int, err error) {
	n, err := size.Chunks(w, g.ChunkBytes)
	if each = min(n, len(w.keys)) / g.Hosts; err == nil && each < 1 {
		err = fmt.Errorf("%w: %d chunks for %d hosts", ErrCapacity, n, g.Hosts)
	}
	return each, err
}

func (g *HostsGrid) run(ctx context.Context, cell int, a *Policy, d Deal, one float64) (r HostsResult, err error) {
	w, size, p := g.cell(cell)
	r = HostsResult{Trace: w.Name, Policy: p.Text, Admit: a.Text, Deal: d.String(), Hosts: g.Hosts, Accesses: w.Accesses()}
	each, err := g.each(w, size)
	if err != nil {
		return r, err
	}
	r.Capacity = each * g.Hosts
	c := &cluster{w: w, result: &r, deal: d, chance: rand.New(rand.NewPCG(g.Options.Seed, 1)), has: make([]uint64, len(w.keys)),
		at: map[uint32]int{}, chunkBytes: g.ChunkBytes}
	defer c.close()
	if err := c.open(ctx, g, p, a, each); err != nil {
		return r, err
	}
	if r.PrefixHits, _, err = w.play(ctx, &g.Options, r.Policy, c.request); err != nil {
		return r, err
	}
	for _, h := range c.hosts {
		if err := h.e.Flush(); err != nil {
			return r, fmt.Errorf("sim: %s: %w", r.Policy, err)
		}
		r.BytesSent = append(r.BytesSent, h.sent)
	}
	r.Copies = c.copies / float64(w.Requests())
	r.PrefixHitRatio, r.OneHostRatio = float64(r.PrefixHits)/float64(r.Accesses), one
	r.BesideOneHost = r.PrefixHitRatio / r.OneHostRatio
	return r, nil
}

// cluster is hosts that lend each other what they hold. Each has a policy for itself.
type cluster struct {
	w          *Workload
	result     *HostsResult
	hosts      []*simHost
	has        []uint64       // by chunk: the hosts that have it
	at         map[uint32]int // where a conversation was last
	deal       Deal
	chance     *rand.Rand
	chunkBytes int64
	turn       int
	turnovers  []time.Duration

	held, different int     // chunks, with and without their copies
	copies          float64 // summed over requests
}

// simHost is one of them. It has one level.
type simHost struct {
	*cache
	number   int
	admit    *policy.Admit
	turnover policy.Turnover
	grants   []uint32 // by slot, since the chunk came there
	taken    []bool   // by slot: another host had offered it, and no lookup has granted it since
	sent     int64
	ask      [1]abi.Candidate
	answer   [1]bool
}

func (c *cluster) open(ctx context.Context, g *HostsGrid, p, a *Policy, capacity int) error {
	units := max(1, g.Options.ChunkUnits)
	bytes := uint64(capacity) * uint64(units) * abi.SizeUnit
	for n := range g.Hosts {
		e, err := p.module.NewEvict(ctx, policy.EvictOptions{MaxSlots: uint32(capacity), Capacity: bytes, Seed: g.Options.Seed, Config: p.config})
		if err != nil {
			return err
		}
		h := &simHost{cache: newCache(c.w, e, capacity, units), number: n, grants: make([]uint32, capacity), taken: make([]bool, capacity)}
		h.evicted = func(slot, id, number uint32, now uint64) error { return c.evictedFrom(h, slot, id, number, now) }
		c.hosts = append(c.hosts, h)
		if h.admit, err = a.module.NewAdmit(ctx, policy.AdmitOptions{Capacity: bytes, Seed: g.Options.Seed, Config: a.config}); err != nil {
			return err
		}
		if err := h.admit.Namespace(0, "model="+c.w.Name+"\n"); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) close() {
	for _, h := range c.hosts {
		_ = h.e.Close() // it never fails
		if h.admit != nil {
			_ = h.admit.Close()
		}
	}
}

// dealt is the host of a request. Requests with the same second chunk are a conversation: many have the first one in common.
func (c *cluster) dealt(ids []uint32) *simHost {
	n, is := 0, len(ids) > 0
	if is {
		n, is = c.at[ids[min(1, len(ids)-1)]]
	}
	if !is || c.chance.Float64() < c.deal.moves {
		n = c.chance.IntN(len(c.hosts))
	}
	if len(ids) > 0 {
		c.at[ids[min(1, len(ids)-1)]] = n
	}
	return c.hosts[n]
}

// request looks up one request's chunks at its host, borrows of the prefix what others have, and stores what is missing. It returns the
// length of the prefix.
func (c *cluster) request(ids []uint32, number uint32) (prefix int, err error) {
	now, h := c.w.times[number-1], c.dealt(ids)
	prefix = len(ids)
	var lent []uint32
	lender := -1
	for depth, id := range ids {
		switch slot := h.slotOf[id]; {
		case slot != abi.None:
			err = h.grant(slot, id, number, now)
		case depth < prefix && c.has[id] != 0:
			if lender < 0 || c.has[id]&(1<<lender) == 0 {
				turn := int(c.w.keys[id] % mostHosts)
				lender = (bits.TrailingZeros64(bits.RotateLeft64(c.has[id], -turn)) + turn) % mostHosts
			}
			c.result.RemoteHits++
			from := c.hosts[lender]
			from.sent += c.chunkBytes
			lent = append(lent, id)
			err = from.grant(from.slotOf[id], id, 0, now)
		default:
			if depth < prefix {
				prefix = depth
				if err = c.promote(h, lent, number, now); err != nil {
					return 0, err
				}
			}
			candidate := abi.Candidate{Kind: abi.KindNew, From: abi.NoLevel, Request: number}
			if depth+1 < len(ids) {
				candidate.Flags = abi.CandidateContinued
			}
			var ok bool
			if ok, err = c.admits(h, candidate, id, now); err == nil && ok {
				_, err = c.put(h, id, number, now)
			} else if err == nil {
				c.result.Refused++
			}
		}
		if err != nil {
			return 0, err
		}
	}
	if prefix == len(ids) {
		err = c.promote(h, lent, number, now)
	}
	if err == nil {
		err = h.e.Event(abi.NewRequestEnd(number, 0, c.w.hints[number-1], now))
	}
	c.copies += float64(c.held) / float64(max(1, c.different))
	return prefix, err
}

func (h *simHost) grant(slot, id, number uint32, now uint64) error {
	h.grants[slot]++
	h.taken[slot] = false
	return h.touch(id, slot, number, now)
}

// promote copies what was lent, if the admit policy likes.
func (c *cluster) promote(h *simHost, lent []uint32, number uint32, now uint64) error {
	for _, id := range lent {
		if c.has[id] == 0 || h.slotOf[id] != abi.None {
			continue // it went while others came
		}
		ok, err := c.admits(h, abi.Candidate{Kind: abi.KindPromotion, From: abi.PeerLevel, Hits: 1}, id, now)
		if err == nil && ok {
			ok, err = c.put(h, id, number, now)
		}
		if err != nil {
			return err
		}
		if ok {
			c.result.Promotions++
		}
	}
	return nil
}

// put stores a chunk in a host, and says whether there was room.
func (c *cluster) put(h *simHost, id, number uint32, now uint64) (bool, error) {
	slot, err := h.store(id, number, now)
	if err != nil || slot == abi.None {
		return false, err
	}
	h.grants[slot], h.taken[slot] = 0, false
	if c.has[id] == 0 {
		c.different++
	}
	c.has[id] |= 1 << h.number
	c.held++
	c.result.MostCopies = max(c.result.MostCopies, bits.OnesCount64(c.has[id]))
	return true, nil
}

// evictedFrom offers a chunk that a host evicts to the one that takes longest to replace what it holds.
func (c *cluster) evictedFrom(h *simHost, slot, id, number uint32, now uint64) error {
	c.held--
	if c.has[id] &^= 1 << h.number; c.has[id] == 0 {
		c.different--
	}
	capacity := int64(len(h.chunkOf))
	h.turnover.Replaced(1, capacity, time.Duration(now))
	if h.taken[slot] {
		return nil
	}
	c.turn++
	c.turnovers = c.turnovers[:0]
	for _, o := range c.hosts {
		t := time.Duration(0)
		if o != h && c.has[id]&(1<<o.number) == 0 {
			t = o.turns(now)
		}
		c.turnovers = append(c.turnovers, t)
	}
	n := policy.Taker(h.turnover.Of(capacity, time.Duration(now)), c.turnovers, c.turn)
	if n < 0 {
		return nil
	}
	to := c.hosts[n]
	ok, err := c.admits(h, abi.Candidate{Kind: abi.KindDemotion, To: abi.PeerLevel, Hits: h.grants[slot]}, id, now)
	if err == nil && ok {
		ok, err = c.admits(to, abi.Candidate{Kind: abi.KindDemotion, From: abi.PeerLevel, Copies: 1}, id, now)
	}
	if err == nil && ok {
		ok, err = c.put(to, id, number, now)
	}
	if err != nil || !ok {
		return err
	}
	to.taken[to.slotOf[id]] = true
	h.sent += c.chunkBytes
	c.result.Demotions++
	return nil
}

// turns is a host's turnover.
func (h *simHost) turns(now uint64) time.Duration {
	capacity := int64(len(h.chunkOf))
	if policy.HasRoom(int64(len(h.free)), capacity) {
		return policy.Endless
	}
	return h.turnover.Of(capacity, time.Duration(now))
}

// admits asks a host's admit policy about a candidate, of which what concerns hosts is filled in but for the copies that are known.
func (c *cluster) admits(h *simHost, q abi.Candidate, id uint32, now uint64) (bool, error) {
	q.Key, q.Size, q.Depth, q.Time = c.w.keys[id], h.units, c.w.depths[id], now
	q.Copies += uint32(bits.OnesCount64(c.has[id] &^ (1 << h.number)))
	if q.To != abi.PeerLevel {
		q.Flags |= abi.CandidateLast
	}
	if h.children[id] > 0 {
		q.Flags |= abi.CandidateContinued
	}
	if parent := c.w.parents[id]; parent != abi.None {
		if q.ParentKey = c.w.keys[parent]; h.slotOf[parent] != abi.None {
			q.Flags |= abi.CandidateParentResident
		}
	}
	h.ask[0] = q
	err := h.admit.Admit(h.ask[:], h.answer[:])
	return h.answer[0], err
}

// WriteTable prints the results: for each workload and capacity one block.
func (o *HostsOutcome) WriteTable(out io.Writer) error {
	g := o.grid
	var b strings.Builder
	for i, w := range g.Workloads {
		fmt.Fprintf(&b, "%s: %d requests, %d accesses to %d chunks\n\n", w.Name, w.Requests(), w.Accesses(), w.Unique())
		for k := range g.Capacities {
			results := o.Results[(i*len(g.Capacities)+k)*g.rows():][:g.rows()]
			rows := [][]string{{fmt.Sprintf("%d hosts, %d chunks", g.Hosts, results[0].Capacity), "prefix hits", "one host", "beside it", "remote",
				"copies", "most", "copied", "demoted", "refused", "sent by a host"}}
			for j := range results {
				r := &results[j]
				rows = append(rows, []string{
					o.label(j), fmt.Sprintf("%.4f", r.PrefixHitRatio), fmt.Sprintf("%.4f", r.OneHostRatio), fmt.Sprintf("%.3f", r.BesideOneHost),
					share(int64(r.RemoteHits), int64(r.PrefixHits)), fmt.Sprintf("%.2f", r.Copies), fmt.Sprint(r.MostCopies), fmt.Sprint(r.Promotions),
					fmt.Sprint(r.Demotions), fmt.Sprint(r.Refused),
					config.DecimalText(slices.Min(r.BytesSent)) + " to " + config.DecimalText(slices.Max(r.BytesSent)),
				})
			}
			align(&b, rows)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// label names a row.
func (o *HostsOutcome) label(row int) string {
	g := o.grid
	d := g.Deals[row%len(g.Deals)]
	a := g.Admissions[row/len(g.Deals)%len(g.Admissions)]
	text := g.Policies[row/len(g.Deals)/len(g.Admissions)].Label
	if len(g.Admissions) > 1 {
		text += ", admit " + a.Label
	}
	return text + ", " + d.String()
}
