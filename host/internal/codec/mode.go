package codec

import "github.com/kvhost/kvhost/host/kv"

// Mode says which pieces of a namespace are compressed, in roots that may hold compressed ones.
type Mode uint8

const (
	Gaining Mode = iota // those of a namespace that gains
	Faster              // those for which that saves time in their root
	Never
)

// Rule is the mode of some namespaces.
type Rule struct {
	Namespaces []kv.Pattern // any of them
	Mode       Mode
}

// Modes are those of all namespaces: that of the first rule that matches, else Rest.
type Modes struct {
	Rules []Rule
	Rest  Mode
}

// of is the mode of a namespace's text.
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

// Any says whether a namespace may have the mode.
func (m *Modes) Any(mode Mode) bool {
	for _, r := range m.Rules {
		if r.Mode == mode {
			return true
		}
	}
	return m.Rest == mode
}
