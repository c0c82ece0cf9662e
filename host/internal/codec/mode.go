package codec

import "github.com/kvhost/kvhost/host/kv"

// Mode determines which pieces of a namespace are compressed, in roots that may hold compressed pieces.
type Mode uint8

const (
	Gaining Mode = iota // pieces of a namespace that gains
	Faster              // pieces that are moved faster when they are compressed
	Never
)

// Rule sets the mode of some namespaces.
type Rule struct {
	Namespaces []kv.Pattern // a namespace must match one of them
	Mode       Mode
}

// Modes are the modes of all namespaces. The first rule that matches applies, or else Rest.
type Modes struct {
	Rules []Rule
	Rest  Mode
}

// of returns the mode for a namespace, given its text.
func (m *Modes) of(text string) Mode {
	for _, r := range m.Rules {
		for _, p := range r.Namespaces {
			if p.Matches(text) {
				return r.Mode
			}
		}
	}
	return m.Rest
}

// Any reports whether any namespace may have the mode.
func (m *Modes) Any(mode Mode) bool {
	for _, r := range m.Rules {
		if r.Mode == mode {
			return true
		}
	}
	return m.Rest == mode
}
