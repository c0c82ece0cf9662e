package server

// Waiting says how many messages wait for their turn.
func (b *inbox) Waiting() int { return int(b.waiting.Load()) }

// Drain handles what waits, in tests without an executor.
func (b *inbox) Drain() {
	for len(b.backlog) > 0 {
		b.inTurn(<-b.backlog)
		b.waiting.Add(-1)
	}
}
