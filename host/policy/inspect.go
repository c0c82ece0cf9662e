package policy

import (
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	metering "github.com/kvhost/kvhost/host/policy/meter"
)

// Inspection is what can be said of a module without running any of it.
type Inspection struct {
	Name     string // the manifest's, or the file's
	Path     string // where it was found; empty when it is embedded in the host
	Digest   string // SHA-256 of its bytes in hexadecimal
	Bytes    int
	Manifest *abi.Manifest // nil when it has none
	Roles    []abi.Role    // those whose functions it exports
	Imports  []Import
	Sections []Section
	Counts   []metering.Count // what it has of all that is limited

	MemoryPages, MostPages uint32 // of 64 KiB: at its start, and the most it may grow to
	Fuel                   Fuel   // what a call of its roles gets, and what on top for a record
	MostFuel               uint64 // for one call whatever the records
	Batch                  int    // events in one call
	StateFormat            string // of what kv_save gives; empty when it keeps none

	// Refused is why it would not be loaded with these options, nil when nothing stands against that so far: the code has
	// not been validated, nor run.
	Refused error
}

// Import is a host function that the module wants.
type Import struct {
	Module, Name, Type string
	Grant              string // that it needs; empty for none
	Known              bool   // this host has it
}

// Section is one section of the module.
type Section struct {
	Name  string
	Bytes int
}

// Inspect reads a module as [Open] would, by path or name, and runs nothing. The error is for what cannot be read at all;
// a module that would be refused is described as far as it makes sense.
func Inspect(name string, opt Options) (*Inspection, error) {
	f, err := read(name, opt.Dir)
	if err != nil {
		return nil, err
	}
	m, _, pages, err := examine(name, f, &opt)
	i := &Inspection{Path: f.path, Digest: f.digest, Bytes: len(f.bytes), MostPages: pages}
	s, scanErr := scanModule(f.bytes)
	if scanErr != nil {
		i.Name, i.Refused = bareName(name), refused(name, err)
		return i, nil
	}
	i.sections(s)
	if err != nil { // as much as can be said of it all the same
		m = &Module{name: bareName(name)}
		m.roles, _ = s.verify()
		_ = m.describe(s)
		i.MostPages = memoryPages(m.manifest, opt.MemoryPages)
	}
	i.Name, i.StateFormat = m.name, m.manifest.StateFormat
	if m.known {
		i.Manifest = &m.manifest
	}
	for r, has := range m.roles {
		if has {
			i.Roles = append(i.Roles, abi.Role(r))
		}
	}
	b := opt.Fuel.budgets(m.manifest.Fuel)
	i.Fuel, i.MostFuel, i.Batch = Fuel{Call: b.call, Record: b.record, Time: b.patience}, b.most, int(b.records())
	counts, limit := metering.Measure(f.bytes, metering.DefaultLimits())
	i.Counts = counts
	if err == nil {
		err = limit
	}
	if err != nil {
		i.Refused = refused(name, err)
	}
	return i, nil
}

func (i *Inspection) sections(s *scan) {
	i.Sections = s.sections
	if len(s.memories) > 0 {
		i.MemoryPages = uint32(min(s.memories[0].min, abi.MaxMemoryPages))
	}
	for _, im := range s.imports {
		f, known := hostFunctions[im.module][im.name]
		i.Imports = append(i.Imports, Import{im.module, im.name, spell(im.sig), f.grant, known})
	}
}

// Grants are those that the module's imports need, sorted.
func (i *Inspection) Grants() []string {
	var grants []string
	for _, im := range i.Imports {
		if im.Grant != "" {
			grants = append(grants, im.Grant)
		}
	}
	slices.Sort(grants)
	return slices.Compact(grants)
}

var sectionNames = [...]string{"custom", "type", "import", "function", "table", "memory", "global", "export", "start", "element", "code", "data", "data count"}

func sectionName(id byte, body []byte) string {
	if int(id) >= len(sectionNames) {
		return fmt.Sprintf("section %d", id)
	}
	if id == 0 {
		r := reader{b: body}
		return "custom " + r.name()
	}
	return sectionNames[id]
}
