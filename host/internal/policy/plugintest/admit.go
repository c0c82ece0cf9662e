package plugintest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
)

// admit checks an admission policy by a stream of candidates in batches of all sizes, which it repeats to other
// instances.
func (c *checker) admit() {
	answers, err := c.admissions(0)
	for _, again := range []struct {
		longer  uint32
		how, do string
	}{
		{0, "another instance with the same seed and candidates answers otherwise", "decide by candidates and Info.seed alone"},
		{16, "with records 16 bytes longer it answers otherwise", "step by the stride of the call, and read only what you know"},
	} {
		var got []byte
		if err == nil {
			if got, err = c.admissions(again.longer); err == nil && !slices.Equal(answers, got) {
				err = c.finding(abi.ExportAdmit, again.how, again.do)
			}
		}
	}
	c.r.add(err)
	if p, err := c.probe(0, 0); err == nil {
		if err := c.room(p, map[int]uint32{abi.BufferArgs: fullBatch * abi.CandidateSize,
			abi.BufferResult: fullBatch}); err == nil {
			c.r.add(c.strangeNamespace(p))
			c.r.add(c.shortRecords(p, abi.ExportAdmit))
		}
		p.Close()
	}
}

func (c *checker) admissions(longer uint32) ([]byte, error) {
	stride := abi.CandidateSize + longer
	p, err := c.ready(longer, map[int]uint32{abi.BufferArgs: fullBatch * stride, abi.BufferResult: fullBatch})
	if err != nil {
		return nil, err
	}
	defer p.Close()
	rng := rand.New(rand.NewPCG(c.o.Seed, 31))
	var answers []byte
	for round := range 400 {
		n := 1 + rng.IntN(fullBatch)
		if round%10 == 0 {
			n = fullBatch
		}
		b, err := p.Bytes(abi.BufferArgs, uint32(n)*stride)
		if err != nil {
			return nil, c.fault(abi.ExportBuffer, "ARGS", err)
		}
		for i := range n {
			*(*abi.Candidate)(unsafe.Pointer(&b[i*int(stride)])) = someCandidate(rng, round)
		}
		p.SetNow(uint64(round) * 1_000_000)
		got, ok, err := c.good(p, abi.ExportAdmit, uint64(n), uint64(stride), n)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if got != uint32(n) {
			return nil, c.finding(abi.ExportAdmit, fmt.Sprintf("it gives %d answers to %d candidates", got, n),
				"answer one byte for each, and n as the count")
		}
		out, err := p.Bytes(abi.BufferResult, got)
		if err != nil {
			return nil, c.fault(abi.ExportAdmit, "RESULT", err)
		}
		for i, a := range out {
			if a > 1 {
				return nil, c.finding(abi.ExportAdmit, fmt.Sprintf("it answers %d for candidate %d", a, i),
					"answer 1 to store and 0 not to")
			}
		}
		answers = append(answers, out...)
	}
	c.r.Memory = max(c.r.Memory, p.MemoryBytes())
	return answers, nil
}

// someCandidate returns a new entry, or one that would move between levels or hosts.
func someCandidate(rng *rand.Rand, round int) abi.Candidate {
	c := abi.Candidate{
		Key: 1 + rng.Uint64N(5000), ParentKey: rng.Uint64N(5000), Namespace: rng.Uint32N(uint32(len(texts))),
		Group: rng.Uint32N(3), Size: 1 + rng.Uint32N(2000), Depth: rng.Uint32N(200), Request: uint32(round),
		Tenant: rng.Uint32N(tenants), Flags: rng.Uint32N(8), Copies: rng.Uint32N(3), Time: uint64(round) * 1_000_000,
		Kind: abi.KindNew, From: abi.NoLevel, To: uint8(rng.UintN(3)),
	}
	near := uint8(rng.UintN(3))
	switch rng.IntN(7) {
	case 0, 1:
		c.Kind, c.From, c.To, c.Hits = abi.KindDemotion, near, near+1, rng.Uint32N(4)
	case 2:
		c.Kind, c.From, c.To, c.Hits = abi.KindPromotion, near+1, near, 1+rng.Uint32N(4)
	case 3: // another host lends the entry, is offered it or offers it
		c.Kind, c.From, c.To, c.Hits = abi.KindPromotion, abi.PeerLevel, near, 1+rng.Uint32N(4)
	case 4:
		c.Kind, c.From, c.To, c.Hits = abi.KindDemotion, near, abi.PeerLevel, rng.Uint32N(4)
	case 5:
		c.Kind, c.From, c.To = abi.KindDemotion, abi.PeerLevel, near
	}
	return c
}
