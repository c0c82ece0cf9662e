package shadow

// Lookup passes one lookup of the live cache on to the shadows. The zero value has no shadows.
type Lookup struct {
	set   *Set
	batch *Batch // nil: there are no shadows
	step  Step   // the common fields of all keys
}

// Lookup begins a lookup. step has the common fields of all keys.
func (s *Set) Lookup(step Step) (l Lookup) {
	if s.On() {
		step.Op, step.First = Ask, true
		l = Lookup{set: s, batch: newBatch(), step: step}
	}
	return l
}

// On reports whether there is a shadow. Otherwise no other method may be called.
func (l *Lookup) On() bool { return l.batch != nil }

// Hit records a key that was granted.
func (l *Lookup) Hit(key, parent uint64, size, depth uint32) {
	step := l.step
	step.Key, step.Parent, step.Size, step.Depth, step.Hit = key, parent, size, depth, true
	l.add(step)
}

// Miss records a key that was not granted.
func (l *Lookup) Miss(key uint64) {
	step := l.step
	step.Key = key
	l.add(step)
}

func (l *Lookup) add(step Step) {
	l.batch = l.set.step(l.batch, step)
	l.step.First = false
}

func (l *Lookup) End() { l.set.send(l.batch) }

// Tell passes on a single step. It has no effect without shadows.
func (s *Set) Tell(step Step) {
	if s.On() {
		s.send(s.step(newBatch(), step))
	}
}
