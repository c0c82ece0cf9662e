package store

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// slowMoves lets copies between levels take longer than any test.
func slowMoves(c *Config) { c.Moves.Bandwidth = 1 }

// TestWriteAround: while demotions are behind, new entries go to the next level themselves. None is lost, and the near
// root keeps what has no copy yet. When the next level takes nothing either, what leaves goes without a copy, so that a
// put is never refused for a slow move.
func TestWriteAround(t *testing.T) {
	f := twoLevels(t, 16, 256, slowMoves)
	f.mustPut(upTo(64)...)
	near := 0
	for n := range uint64(64) {
		switch f.rootOf(n) {
		case -1:
			t.Errorf("entry %d is in no level", n)
		case 0:
			near++
		}
	}
	if near < 14 {
		t.Errorf("%d entries in the near root, which holds 16", near)
	}
	equal(t, "entries that went without a copy", f.moved(1, moves.Demotion).Shed.Load(), 0)
	if around := f.store.Stats().Levels[0].Around; around < 40 || around > 50 {
		t.Errorf("%d of 64 entries went around a root for 16", around)
	}
	f.checkUsed()

	f = twoLevels(t, 16, 8, slowMoves, func(c *Config) { c.Roots[1].DailyWrites = 4 * pieceBytes })
	f.mustPut(upTo(64)...)
	for n := uint64(50); n < 64; n++ {
		equal(t, "root of a late entry", f.rootOf(n), 0)
	}
	equal(t, "entries that went without a copy", f.moved(1, moves.Demotion).Shed.Load() > 20, true)
	f.checkUsed()
}

// TestPromotionBehind: what is loaded from the far level costs no entry of the near one its copy.
func TestPromotionBehind(t *testing.T) {
	f := twoLevels(t, 16, 256, slowMoves)
	f.mustPut(upTo(64)...)
	equal(t, "root of the last entry", f.rootOf(63), 1)
	for range 3 {
		f.mustRead(63)
	}
	for n := range uint64(64) {
		if f.rootOf(n) < 0 {
			t.Errorf("entry %d is in no level", n)
		}
	}
	equal(t, "entries that went without a copy", f.moved(1, moves.Demotion).Shed.Load(), 0)
	f.checkUsed()
}

// TestQuotaLeaves: a tenant at its quota gets room in the near root although that is not full: its entries leave, and
// none of them is lost.
func TestQuotaLeaves(t *testing.T) {
	f := twoLevels(t, 64, 256, func(c *Config) { c.Quotas = []Quota{{First: 7, Last: 7, Bytes: 40 * pieceBytes}} })
	last := 0
	for n := range uint64(40) {
		must(t, f.putOf(7, n))
		f.settle()
		if f.rootOf(n) == 0 {
			last = int(n)
		}
	}
	if last < 38 {
		t.Errorf("the last entry of the tenant in the near root is %d of 40", last)
	}
	d := f.moved(1, moves.Demotion)
	equal(t, "entries that went without a copy", d.Shed.Load(), 0)
	equal(t, "entries that were copied or not wanted", d.Done.Load()+d.Refused.Load() > 25, true)
	equal(t, "entries that went around", f.store.Stats().Levels[0].Around <= 1, true)
	f.checkUsed()
}

// picky is an admit policy that lets nothing move, and remembers what it was asked.
type picky struct{ asked map[abi.CandidateKind]int }

func (p picky) Admit(batch []abi.Candidate, dst []bool) {
	for i, c := range batch {
		p.asked[c.Kind]++
		dst[i] = c.Kind == abi.KindNew
	}
}

// TestAdmitsMoves: an admit policy decides what moves to the levels that it is given, and the built-in rule what moves to
// the others.
func TestAdmitsMoves(t *testing.T) {
	for _, c := range []struct {
		levels                uint8
		demotions, promotions bool // asked for
	}{{0, false, false}, {1, false, true}, {2, true, false}, {3, true, true}} {
		p := picky{map[abi.CandidateKind]int{}}
		h := handle(policy.NativeModule("picky", []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) { return p, nil }))
		h.Levels = c.levels
		f := twoLevels(t, 16, 256, func(cfg *Config) { cfg.Policies.Admit = h })
		for n := range uint64(40) {
			f.mustPut(n)
			f.settle()
		}
		if !c.demotions {
			f.mustRead(0, 0)
			f.settle()
		}
		must(t, f.store.Close())
		equal(t, "demotions that the policy was asked about", p.asked[abi.KindDemotion] > 20, c.demotions)
		equal(t, "demotions made", f.moved(1, moves.Demotion).Done.Load() > 20, !c.demotions)
		if !c.demotions {
			equal(t, "promotions that the policy was asked about", p.asked[abi.KindPromotion] > 0, c.promotions)
			equal(t, "promotions made", f.moved(0, moves.Promotion).Done.Load() > 0, !c.promotions)
		}
	}
}

// ends is an admit policy that keeps new ends of prompts out of the far level. It remembers what it was asked about new ones.
type ends struct{ asked []abi.Candidate }

func (p *ends) Admit(batch []abi.Candidate, dst []bool) {
	for i, c := range batch {
		if c.Kind == abi.KindNew {
			p.asked = append(p.asked, c)
		}
		dst[i] = c.Kind != abi.KindNew || c.To == 0 || c.Flags&abi.CandidateContinued != 0
	}
}

// TestAroundIsJudged: what is new and would go around a level is judged by the policy of the level that it would go to, as
// its demotion would be.
func TestAroundIsJudged(t *testing.T) {
	p := &ends{}
	h := handle(policy.NativeModule("ends", []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) { return p, nil }))
	h.Levels = 3
	f := twoLevels(t, 16, 256, slowMoves, func(c *Config) { c.Policies.Admit = h })
	refused := 0
	for n := range uint64(64) {
		p.asked = nil
		put, err := f.store.Put(t.Context(), PutRequest{Namespace: f.space, Key: testKey(n), Request: 7, Continued: n%2 == 0})
		if err == nil {
			if err = write(put); err != nil {
				t.Fatal(err)
			}
			err = put.Publish(t.Context())
		}
		last := p.asked[len(p.asked)-1]
		switch around := last.To == 1; {
		case around && n%2 == 1:
			refused++
			if !errors.Is(err, ErrRefused) || f.rootOf(n) != -1 {
				t.Errorf("entry %d is in root %d: %v", n, f.rootOf(n), err)
			}
		case err != nil:
			t.Errorf("entry %d: %v", n, err)
		case around && (f.rootOf(n) != 1 || last.From != abi.NoLevel || last.Request != 7):
			t.Errorf("entry %d is in root %d after %+v", n, f.rootOf(n), last)
		}
	}
	if refused < 15 || refused > 25 {
		t.Errorf("%d of 64 entries were refused", refused)
	}
	equal(t, "puts refused", f.store.Stats().Refused, uint64(refused))
	f.checkUsed()
}
