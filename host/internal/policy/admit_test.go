package policy

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// candidates are new entries and moves in turn, with keys and times that count up.
func candidates(n int) []abi.Candidate {
	batch := make([]abi.Candidate, n)
	for i := range batch {
		batch[i] = abi.Candidate{
			Key: uint64(i), ParentKey: ^uint64(0), Size: ^uint32(0), Flags: 1, Time: uint64(i / 2),
			Kind: abi.CandidateKind(i % 3), From: 0xff, To: 0xff, Hits: ^uint32(0),
		}
	}
	return batch
}

// A module that was built when candidates had 56 bytes steps by the host's stride, and decides as it did.
func TestAdmitOfRelease01(t *testing.T) {
	testenv.Slow(t)
	m, err := Open(t.Context(), "testdata/admit_release01.wasm", Options{})
	testenv.OK(t, err)
	defer m.Close(t.Context())
	a, err := m.NewAdmit(t.Context(), AdmitOptions{})
	testenv.OK(t, err)
	defer a.Close()
	for _, n := range []int{1, 2, 255, 256, 600} {
		batch, dst := candidates(n), make([]bool, n)
		testenv.OK(t, a.Admit(batch, dst))
		for i, got := range dst {
			if want := i%2 == 1 && i/2%3 == 0; got != want {
				t.Errorf("%d candidates: answer %d is %v", n, i, got)
			}
		}
	}
	if s := a.Stats(); s.Faults != 0 || s.Builtin {
		t.Errorf("the stats of the old module are %+v, want no fault", s)
	}
}

// The rule of SPEC.md, section 9, for calls that a policy leaves to the host.
func TestAdmitsByDefault(t *testing.T) {
	const there, goesOn = abi.CandidateParentResident, abi.CandidateContinued
	for _, c := range []struct {
		kind   abi.CandidateKind
		hits   uint32
		parent uint64
		flags  uint32
		copies uint32
		from   uint8
		to     uint8
		want   bool
	}{
		{kind: abi.KindNew, want: true},
		{kind: abi.KindNew, parent: 1, flags: there, want: true},
		{kind: abi.KindDemotion, want: false},
		{kind: abi.KindDemotion, hits: 1, want: true},
		{kind: abi.KindDemotion, hits: 1, parent: 1, want: true},
		{kind: abi.KindDemotion, parent: 1, flags: there, want: false},
		{kind: abi.KindDemotion, parent: 1, flags: goesOn, want: false},
		{kind: abi.KindDemotion, parent: 1, flags: there | goesOn, want: true},
		{kind: abi.KindDemotion, flags: goesOn, want: true},
		{kind: abi.KindPromotion, hits: 1, want: false},
		{kind: abi.KindPromotion, hits: 1, parent: 1, flags: there | goesOn, want: false},
		{kind: abi.KindPromotion, hits: 2, want: true},
		{kind: abi.KindPromotion, flags: abi.CandidateRoom, want: false},
		{kind: abi.KindPromotion, hits: 1, flags: abi.CandidateRoom, want: true},
		{kind: abi.KindPromotion, from: abi.PeerLevel, hits: 1, flags: abi.CandidateRoom, want: false},
		{kind: abi.KindPromotion, hits: 9, want: true},
		{kind: abi.KindPromotion + 1, hits: 9, flags: there | goesOn, want: false},
		{kind: abi.KindNew, copies: 3, want: true},
		{kind: abi.KindDemotion, hits: 9, copies: 1, want: false},
		{kind: abi.KindDemotion, to: abi.PeerLevel, want: true},
		{kind: abi.KindDemotion, to: abi.PeerLevel, hits: 9, copies: 1, want: false},
		{kind: abi.KindDemotion, from: abi.PeerLevel, copies: 1, flags: abi.CandidateLast, want: true},
		{kind: abi.KindDemotion, from: abi.PeerLevel, want: true},
		{kind: abi.KindDemotion, from: abi.PeerLevel, copies: 2, want: false},
		{kind: abi.KindPromotion, from: abi.PeerLevel, hits: 9, copies: 1, flags: abi.CandidateLast, want: false},
		{kind: abi.KindPromotion, from: abi.PeerLevel, hits: 2, copies: 1, want: true},
		{kind: abi.KindPromotion, from: 1, hits: 2, copies: 1, flags: abi.CandidateLast, want: true},
	} {
		q := abi.Candidate{Kind: c.kind, Hits: c.hits, ParentKey: c.parent, Flags: c.flags, Copies: c.copies, From: c.from, To: c.to}
		if got := AdmitsByDefault(&q); got != c.want {
			t.Errorf("the default for %+v: got %v", c, got)
		}
	}
}

// What the host answers for a module that failed, or that leaves the call to it, is that rule, and so is what it answers
// where no module is bound.
func TestTheHostAnswersByDefault(t *testing.T) {
	modules := map[string]*Module{
		"down":    open(t, minimal(abi.RoleAdmit).With(abi.ExportAdmit, "ii>I", unreachable), Options{}),
		"leaves":  open(t, minimal(abi.RoleAdmit).With(abi.ExportAdmit, "ii>I", wasmtest.Packed(abi.StatusDefault, 0)), Options{}),
		"builtin": Builtin(abi.RoleAdmit),
	}
	for name, m := range modules {
		t.Run(name, func(t *testing.T) {
			a, err := m.NewAdmit(t.Context(), AdmitOptions{})
			testenv.OK(t, err)
			defer a.Close()
			batch := []abi.Candidate{{}, {Kind: abi.KindDemotion}, {Kind: abi.KindPromotion, Hits: 1}, {Kind: abi.KindPromotion, Hits: 2}}
			dst := []bool{false, true, true, false}
			if err := a.Admit(batch, dst); err != nil || !dst[0] || dst[1] || dst[2] || !dst[3] {
				t.Errorf("new, demotion, first and second hit: admitted %v, %v", dst, err)
			}
		})
	}
}
