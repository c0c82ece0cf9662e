package sim

// Prefill is a model of the cost of recomputing a chunk's KV. A token takes 1/TokensPerSecond at the start of a
// context and, because it attends to all tokens before it, (1 + position/DoubleAt) times as long at a position.
type Prefill struct {
	TokensPerSecond float64
	DoubleAt        float64 // tokens of context at which a token costs twice as much
	ChunkTokens     int
}

// DefaultPrefill is in the range of an 8-billion-parameter model on one recent data-centre GPU.
func DefaultPrefill() Prefill {
	return Prefill{TokensPerSecond: 20000, DoubleAt: 32768, ChunkTokens: 512}
}

// upTo is, for each n up to chunks, the seconds to compute the first n chunks of a prompt.
func (p Prefill) upTo(chunks int) []float64 {
	costs := make([]float64, chunks+1)
	if p.TokensPerSecond <= 0 || p.ChunkTokens <= 0 {
		return costs
	}
	for n := range costs {
		tokens := float64(n) * float64(p.ChunkTokens)
		costs[n] = tokens / p.TokensPerSecond
		if p.DoubleAt > 0 {
			costs[n] += tokens * tokens / 2 / p.DoubleAt / p.TokensPerSecond
		}
	}
	return costs
}

// total is the cost of computing every request in full.
func (p Prefill) total(w *Workload) (seconds float64) {
	costs := p.upTo(w.longest)
	lo := uint32(0)
	for _, end := range w.ends {
		seconds += costs[end-lo]
		lo = end
	}
	return seconds
}
