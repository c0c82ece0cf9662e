package policy

import "slices"

// Pin is what must be the same for a module to be the same again, in another run.
type Pin struct {
	SHA256      string   `json:"sha256"`
	Grants      []string `json:"grants,omitempty"`
	MemoryPages uint32   `json:"memory_pages,omitempty"`
	Fuel        Fuel     `json:"fuel"`
}

// Options are those to open the module with; the rest is the caller's.
func (p Pin) Options(rest Options) Options {
	rest.SHA256, rest.PublicKey = p.SHA256, "" // it was verified when it was pinned
	rest.Grants, rest.MemoryPages, rest.Fuel = slices.Clone(p.Grants), p.MemoryPages, p.Fuel
	return rest
}

// source is kept of modules whose decisions outlive their run.
type source struct {
	bytes []byte
	pin   Pin
}

// Source is a place module's bytes, and what to open them with; nothing for other modules.
func (m *Module) Source() ([]byte, Pin) { return m.source.bytes, m.source.pin }
