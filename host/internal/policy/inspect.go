package policy

import (
	"context"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Inspection is what can be learned about a module without running it.
type Inspection struct {
	Name     string           `json:"name"`           // the manifest's, or the file's
	Path     string           `json:"path,omitempty"` // where it was found; empty when it is embedded in the host
	Digest   string           `json:"sha256"`         // of its bytes in hexadecimal
	Bytes    int              `json:"bytes"`
	Manifest *abi.Manifest    `json:"manifest"` // nil when it has none
	Roles    []abi.Role       `json:"-"`        // its exports have their functions
	Imports  []sandbox.Import `json:"imports"`
	Counts   []meter.Count    `json:"-"` // its size in everything that is limited

	MemoryPages uint32       `json:"memory_pages"`           // of 64 KiB, at its start
	MostPages   uint32       `json:"most_memory_pages"`      // that it may grow to
	Fuel        sandbox.Fuel `json:"fuel"`                   // what a call of its roles gets, and what on top for a record
	MostFuel    uint64       `json:"fuel_most"`              // for one call whatever the records
	Batch       int          `json:"batch"`                  // events in one call
	StateFormat string       `json:"state_format,omitempty"` // of what kv_save gives; empty when it keeps none

	// Refused is why the module would not be loaded with these options. It is nil if no reason was found; the code was
	// neither validated nor run.
	Refused error `json:"-"`
}

// Inspect reads a module as [Open] would, by path or name, and runs nothing. It returns an error only if the module
// cannot be read at all; one that would be refused is described as far as possible.
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
