package budget

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
)

type Config struct {
	Of      string   // what it is of, for refusals: "memory"
	Limit   int64    // of all holders and the host's own together
	Own     int64    // that the host has taken for itself
	Holders int      // most of them at a time
	Least   int64    // that each holder must be able to hold at any time
	Parts   []string // what holders hold it for
	Half    bool     // a tenant has at most half of the holders, but for 0, which is the operator
	First   bool     // a holder that holds nothing may exceed its share: what it needs is larger than shares may be
	Advice  string   // to a holder that is refused: what it can do
}

// Budget is divided among holders. It is safe for concurrent use and calls nothing under its lock.
type Budget struct {
	cfg    Config
	each   int64 // set aside for each holder
	common int64 // that can be borrowed

	mu      sync.Mutex
	loans   int64
	held    int64
	refused uint64
	joined  uint64
	active  int // holders that have not left
	tenants map[uint32]*tenant
	holders map[*Holder]struct{}
}

// tenant is what the holders of one tenant have together.
type tenant struct {
	holders int
	loans   int64
	held    int64
}

// Holder is one that holds a part of a budget. Its fields are guarded by the budget's lock.
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

// DivideAs divides what another budget has, among as many holders at most. Those who hold more than they may have then keep
// it, and get no more.
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

// Join adds a holder. Its name is for people.
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
	case b.loans > b.common && !b.cfg.First: // then what is set aside for the next holder is not free
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

// enter counts the holder among a tenant's.
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

// exit is the opposite of enter.
func (h *Holder) exit() {
	t := h.tenant
	t.holders--
	t.held -= h.held
	t.loans -= h.borrowed()
	if t.holders == 0 {
		delete(h.budget.tenants, h.id)
	}
}

// Is tells what is known of a holder by now: its name, and its tenant, which has what it holds from now on.
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

// borrowed is what a holder has of the half that can be borrowed. Nothing is set aside for one that has left.
func (h *Holder) borrowed() int64 {
	if h.left {
		return h.held
	}
	return max(0, h.held-h.budget.each)
}

// Take takes n for a part, or says why the holder may not have it.
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

// Count takes n for a part, whatever the holder's share is.
func (h *Holder) Count(part int, n int64) {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	h.add(part, n)
}

// first says whether n is the holder's first, which it gets above its share: if its tenant has nothing, or no more than half of
// all with it, and there is so much; or if no holder has anything.
func (h *Holder) first(n int64) bool {
	b, t := h.budget, h.tenant
	if !b.cfg.First || h.held > 0 {
		return false
	}
	pool := b.cfg.Limit - b.cfg.Own
	return b.held == 0 || n <= pool-b.held && (t.held == 0 || n <= pool/2-t.held)
}

// may is how much the holder may hold now.
func (h *Holder) may() int64 {
	b, t, own := h.budget, h.tenant, h.borrowed()
	free := b.common - b.loans
	tenantMay := (free + t.loans) / 2             // as much as it leaves free
	mine := (max(0, tenantMay-t.loans) + own) / 2 // and the same within the tenant's
	return b.each + mine
}

// Give gives n of a part back.
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

// Leave ends a holder. What it holds counts as borrowed until it is given back.
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

// Alone is what a holder may hold while there are no others.
func (b *Budget) Alone() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.each + b.common/4
}

// Held is what the holder holds.
func (h *Holder) Held() int64 {
	h.budget.mu.Lock()
	defer h.budget.mu.Unlock()
	return h.held
}

// Figures are a budget at one moment.
type Figures struct {
	Of               string
	Limit, Own, Held int64
	Holders          int
	Refused          uint64 // requests, since the start
	Parts            map[string]int64
	Most             []Share // the holders that hold most, in descending order
}

// Share is what one holder holds.
type Share struct {
	Holder string
	Tenant uint32
	Held   int64
}

// Figures reads a budget, with at most so many holders.
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
