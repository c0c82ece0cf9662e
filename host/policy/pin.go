package policy

import (
	"slices"

	"github.com/kvhost/kvhost/host/policy/sandbox"
)

// Pin is what identifies a module across runs.
type Pin struct {
	SHA256      string       `json:"sha256"`
	Grants      []string     `json:"grants,omitempty"`
	MemoryPages uint32       `json:"memory_pages,omitempty"`
	Fuel        sandbox.Fuel `json:"fuel"`
}

// Options are the options to open the module with. The caller provides the rest.
func (p Pin) Options(rest Options) Options {
	rest.SHA256, rest.PublicKey = p.SHA256, "" // it was verified when it was pinned
	rest.Grants, rest.MemoryPages, rest.Fuel = slices.Clone(p.Grants), p.MemoryPages, p.Fuel
	return rest
}

// source is kept for modules whose decisions outlive the process.
type source struct {
	bytes []byte
	pin   Pin
}

// Source is the bytes of a place module and what to open them with. It is empty for other modules.
func (m *Module) Source() ([]byte, Pin) { return m.source.bytes, m.source.pin }
