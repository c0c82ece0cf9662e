package policy

import (
	"context"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Inspection describes a module that was not run.
type Inspection struct {
	Name     string           `json:"name"`           // name in the manifest, or of the file
	Path     string           `json:"path,omitempty"` // path of the file; empty if the module is embedded in the host
	Digest   string           `json:"sha256"`         // digest of the bytes in hexadecimal
	Bytes    int              `json:"bytes"`
	Manifest *abi.Manifest    `json:"manifest"` // nil if there is none
	Roles    []abi.Role       `json:"-"`        // roles whose functions it exports
	Imports  []sandbox.Import `json:"imports"`
	Counts   []meter.Count    `json:"-"` // counts of everything that is limited

	MemoryPages uint32       `json:"memory_pages"`           // pages of 64 KiB at the start
	MostPages   uint32       `json:"most_memory_pages"`      // most pages of 64 KiB
	Fuel        sandbox.Fuel `json:"fuel"`                   // fuel of a call, and for each record
	MostFuel    uint64       `json:"fuel_most"`              // limit of one call, whatever its records
	Batch       int          `json:"batch"`                  // most events in one call
	StateFormat string       `json:"state_format,omitempty"` // format of saved states; empty if it saves none

	// Refused is the reason for which the module would not be loaded with these options. It is nil if none was found;
	// the code was neither validated nor run.
	Refused error `json:"-"`
}

// Inspect reads a module as [Open] would, by path or name, and runs nothing. It returns an error only if the module
// cannot be read at all. A module that would be refused is described as far as possible.
func Inspect(ctx context.Context, name string, opt Options) (*Inspection, error) {
	f, err := read(ctx, name, &opt)
	if err != nil {
		return nil, err
	}
	m, _, pages, err := examine(ctx, name, f, &opt)
	i := &Inspection{Imports: []sandbox.Import{}, Path: f.path, Digest: f.digest, Bytes: len(f.bytes), MostPages: pages}
	s, scanErr := sandbox.ScanModule(f.bytes)
	if scanErr != nil {
		i.Name, i.Refused = label(name), refused(name, err)
		return i, nil
	}
	i.Imports = s.Imported()
	i.MemoryPages = uint32(min(s.Pages, abi.MaxMemoryPages))
	if err != nil { // describe it as far as possible
		m = &Module{name: label(name)}
		m.roles, _ = s.Verify()
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
	l := opt.Fuel.Limits(m.manifest.Fuel)
	i.Fuel, i.MostFuel, i.Batch = sandbox.Fuel{Call: l.Call, Record: l.Record, Time: l.CPUTime}, l.Max, l.Batch()
	var limit error
	if i.Counts, limit = s.Measure(); err == nil {
		err = limit
	}
	if err != nil {
		i.Refused = refused(name, err)
	}
	return i, nil
}

// Grants returns the grants that the module's imports need, sorted.
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
