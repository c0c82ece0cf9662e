package budget

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
)

type Config struct {
	Of      string   // name of the resource, for refusals: "memory"
	Limit   int64    // total of all holders and of the host itself
	Own     int64    // amount that the host has taken for itself
	Holders int      // most holders at a time
	Least   int64    // amount that each holder must always be able to hold
	Parts   []string // purposes for which holders take the resource
	Half    bool     // a tenant may have at most half of the holders; tenant 0, the operator, may have all
	First   bool     // a holder that holds nothing may exceed its share, because its first piece may be larger than a share
	Advice  string   // remedy for a holder that is refused
}

// Budget divides a limited resource among holders. It is safe for concurrent use and calls nothing under its lock.
type Budget struct {
	cfg    Config
	each   int64 // amount reserved for each holder
	common int64 // amount that can be borrowed

	mu      sync.Mutex
	loans   int64
	held    int64
	refused uint64
	joined  uint64
	active  int // holders that have not left
	tenants map[uint32]*tenant
	holders map[*Holder]struct{}
}

// tenant is the sum over the holders of one tenant.
type tenant struct {
	holders int
	loans   int64
	held    int64
}

// Holder holds a part of a budget. Its fields are guarded by the budget's lock.
type Holder struct {
	budget *Budget
	number uint64
	name   string
	id     uint32
	tenant *tenant
	held   int64
	parts  []int64
	left   bool
}

func New(cfg Config) (*Budget, error) {
	cfg.Holders = max(1, cfg.Holders)
	pool := cfg.Limit - cfg.Own
	b := &Budget{cfg: cfg, each: pool / 2 / int64(cfg.Holders), tenants: map[uint32]*tenant{}, holders: map[*Holder]struct{}{}}
	b.common = pool - b.each*int64(cfg.Holders)
	if pool <= 0 || b.each < cfg.Least {
		return nil, fmt.Errorf("%w: %s: %d less the host's own %d leaves %d for each of %d holders, who need at least %d",
			ErrConfig, cfg.Of, cfg.Limit, cfg.Own, max(0, b.each), cfg.Holders, cfg.Least)
	}
	return b, nil
}

// DivideAs takes over the limits of another budget and divides them among as many holders. A holder that has more than its new
// share keeps it and gets no more.
func (b *Budget) DivideAs(o *Budget) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cfg.Limit, b.cfg.Own, b.cfg.Holders, b.each, b.common, b.loans = o.cfg.Limit, o.cfg.Own, o.cfg.Holders, o.each, o.common, 0
	for _, t := range b.tenants {
		t.loans = 0
	}
	for h := range b.holders {
		b.loans += h.borrowed()
		h.tenant.loans += h.borrowed()
	}
}

// Join adds a holder. The name is shown to the operator.
func (b *Budget) Join(name string, id uint32) (*Holder, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.active >= b.cfg.Holders:
		b.refused++
		return nil, fmt.Errorf("%w: %s: %d, that is the limit", ErrHolders, b.cfg.Of, b.active)
	case b.cfg.Half && id != 0 && b.tenants[id] != nil && b.tenants[id].holders >= b.cfg.Holders/2:
		b.refused++
		return nil, fmt.Errorf("%w: %s: %d of one user, that is the limit", ErrHolders, b.cfg.Of, b.tenants[id].holders)
	case b.loans > b.common && !b.cfg.First: // then the amount reserved for the next holder is not free
		b.refused++
		return nil, fmt.Errorf("%w: %s: those that have left hold %d more than can be borrowed", ErrShare, b.cfg.Of, b.loans-b.common)
	}
	b.joined++
	b.active++
	h := &Holder{budget: b, number: b.joined, name: name, parts: make([]int64, len(b.cfg.Parts))}
	b.holders[h] = struct{}{}
	h.enter(id)
	return h, nil
}

// enter adds the holder to a tenant.
func (h *Holder) enter(id uint32) {
	t := h.budget.tenants[id]
	if t == nil {
		t = &tenant{}
		h.budget.tenants[id] = t
	}
	t.holders++
	t.held += h.held
	t.loans += h.borrowed()
	h.id, h.tenant = id, t
}

// exit removes the holder from its tenant.
func (h *Holder) exit() {
	t := h.tenant
	t.holders--
	t.held -= h.held
	t.loans -= h.borrowed()
	if t.holders == 0 {
		delete(h.budget.tenants, h.id)
	}
}

// Is sets the name and the tenant of a holder when they become known. The tenant takes over the amount that the holder has.
func (h *Holder) Is(name string, id uint32) {
	b := h.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	h.name = name
	if id != h.id {
		h.exit()
		h.enter(id)
	}
}

// borrowed returns the part of the holder's amount that is borrowed. A holder that has left has no reserved amount.
func (h *Holder) borrowed() int64 {
	if h.left {
		return h.held
	}
	return max(0, h.held-h.budget.each)
}

// Take takes n for a part. The error is a [Refusal] if the holder may not have it.
func (h *Holder) Take(part int, n int64) error {
	b := h.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if n > h.may()-h.held && !h.first(n) {
		b.refused++
		return &Refusal{Of: b.cfg.Of, Holder: h.name, Wanted: n, Held: h.held, May: max(h.held, h.may()), Advice: b.cfg.Advice}
	}
	h.add(part, n)
	return nil
}

// Count takes n for a part, even beyond the holder's share.
func (h *Holder) Count(part int, n int64) {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.add(part, n)
}

// first reports whether the holder may take n beyond its share because it holds nothing yet. That much must be free, and a
// tenant that already holds something may reach half of the whole. If no holder has anything, any amount is allowed.
func (h *Holder) first(n int64) bool {
	b, t := h.budget, h.tenant
	if !b.cfg.First || h.held > 0 {
		return false
	}
	pool := b.cfg.Limit - b.cfg.Own
	return b.held == 0 || n <= pool-b.held && (t.held == 0 || n <= pool/2-t.held)
}

// may returns the amount that the holder may hold now.
func (h *Holder) may() int64 {
	b, t, own := h.budget, h.tenant, h.borrowed()
	free := b.common - b.loans
	tenantMay := (free + t.loans) / 2             // a tenant may borrow as much as it leaves free
	mine := (max(0, tenantMay-t.loans) + own) / 2 // and so may a holder within its tenant's part
	return b.each + mine
}

// Give returns n of a part.
func (h *Holder) Give(part int, n int64) {
	b := h.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	h.add(part, -n)
	if h.left && h.held == 0 {
		h.remove()
	}
}

func (h *Holder) add(part int, n int64) {
	b, before := h.budget, h.borrowed()
	h.held += n
	h.parts[part] += n
	extra := h.borrowed() - before
	b.held += n
	b.loans += extra
	h.tenant.held += n
	h.tenant.loans += extra
	if invariants && (h.parts[part] < 0 || b.held < 0 || b.loans < 0 || h.tenant.loans < 0) {
		panic(fmt.Sprintf("budget: %s: %s holds %d for %s", b.cfg.Of, h.name, h.parts[part], b.cfg.Parts[part]))
	}
}

// Leave ends a holder. The amount that it still holds counts as borrowed until it is returned.
func (h *Holder) Leave() {
	b := h.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if h.left {
		return
	}
	before := h.borrowed()
	h.left = true
	extra := h.borrowed() - before
	b.loans += extra
	h.tenant.loans += extra
	b.active--
	if h.held == 0 {
		h.remove()
	}
}

// remove forgets a holder that has left and holds nothing.
func (h *Holder) remove() {
	if _, in := h.budget.holders[h]; in {
		h.exit()
		delete(h.budget.holders, h)
	}
}

// Alone returns the amount that a single holder may have.
func (b *Budget) Alone() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.each + b.common/4
}

// Held returns the amount that the holder has.
func (h *Holder) Held() int64 {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	return h.held
}

// Figures is the state of a budget at one moment.
type Figures struct {
	Of               string
	Limit, Own, Held int64
	Holders          int
	Refused          uint64 // requests refused since the start
	Parts            map[string]int64
	Most             []Share // largest holders in descending order
}

// Share is the amount that one holder has.
type Share struct {
	Holder string
	Tenant uint32
	Held   int64
}

// Figures returns the state of the budget, with at most the given number of holders.
func (b *Budget) Figures(most int) Figures {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := Figures{Of: b.cfg.Of, Limit: b.cfg.Limit, Own: b.cfg.Own, Held: b.held, Holders: b.active, Refused: b.refused,
		Parts: map[string]int64{}}
	for _, part := range b.cfg.Parts {
		f.Parts[part] = 0
	}
	for h := range b.holders {
		for part, n := range h.parts {
			f.Parts[b.cfg.Parts[part]] += n
		}
	}
	if most > 0 {
		list := slices.SortedFunc(maps.Keys(b.holders), func(a, c *Holder) int {
			return cmp.Or(cmp.Compare(c.held, a.held), cmp.Compare(a.number, c.number))
		})
		for _, h := range list[:min(most, len(list))] {
			f.Most = append(f.Most, Share{Holder: h.name, Tenant: h.id, Held: h.held})
		}
	}
	return f
}
