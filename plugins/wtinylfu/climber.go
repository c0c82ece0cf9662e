package wtinylfu

// climber sets the window's share by hill climbing: it tries a step, and as long as the hit ratio does not fall it keeps
// going that way, with ever smaller steps; when the ratio falls it turns round; when it jumps the steps are large again.
type climber struct {
	hits, misses uint64
	last         int64 // hit ratio of the last sample, in ratioUnit
	step         int64 // parts of shareUnit; the sign is the direction
}

const (
	shareUnit = 1 << 20
	ratioUnit = 1 << 20

	firstStep = shareUnit / 16  // 6.25 %
	restart   = ratioUnit / 20  // a change of 5 % starts over
	decayNum  = 98              // of 100, per sample
	minWindow = shareUnit / 100 // 1 %
	maxWindow = shareUnit * 80 / 100
)

// sample answers the window's new share when a sample of so many accesses is complete, and share otherwise.
func (c *climber) sample(size uint64, share int64) int64 {
	n := c.hits + c.misses
	if n < size {
		return share
	}
	ratio := int64(c.hits * ratioUnit / n)
	change := ratio - c.last
	c.hits, c.misses, c.last = 0, 0, ratio
	move := c.step
	if change < 0 {
		move = -move
	}
	switch {
	case change >= restart || change <= -restart:
		c.step = firstStep
		if move < 0 {
			c.step = -firstStep
		}
	default:
		c.step = move * decayNum / 100
	}
	return min(maxWindow, max(minWindow, share+move))
}
