package sandbox

import (
	"encoding/binary"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
)

// Scan holds the sections of a module that is not compiled yet. Its methods interpret them for this host.
// [Scan.Compilable] leaves custom sections out, so that no decoder sees them.
type Scan struct {
	*meter.Module
	manifest []byte
}

// Import is a host function that a module imports.
type Import struct {
	Module string `json:"module"`
	Name   string `json:"name"`
	Type   string `json:"type"`
	Grant  string `json:"grant,omitempty"` // the grant that it needs; empty: none
	Known  bool   `json:"known"`           // this host has the function
}

// MaxModuleBytes is the most bytes of a module's file.
const MaxModuleBytes = meter.MaxModuleBytes

func ScanModule(b []byte) (*Scan, error) {
	m, err := meter.Read(b)
	if err != nil {
		return nil, err
	}
	s := &Scan{Module: m}
	for _, section := range m.Sections {
		switch {
		case !section.Custom() || section.Name != abi.ManifestSection:
		case s.manifest != nil:
			return nil, fmt.Errorf("%s: there are two of it", &section)
		default:
			s.manifest = append([]byte{}, section.Body...)
		}
	}
	return s, nil
}

// Manifest returns the content of the manifest section; nil without one.
func (s *Scan) Manifest() []byte { return s.manifest }

// Imported returns the functions that the module imports.
func (s *Scan) Imported() []Import {
	list := []Import{}
	for _, i := range s.Imports {
		f, known := hostFunctions[i.Module][i.Name]
		list = append(list, Import{meter.Printable(i.Module, meter.MaxShown), meter.Printable(i.Name, meter.MaxShown), spell(i.Sig),
			f.grant, known})
	}
	return list
}

// Compilable returns the module for decoders and compilers: its standard sections unchanged, and a name section with
// printable names of functions only, for the stack of a fault.
func (s *Scan) Compilable() []byte {
	out := []byte(meter.Header)
	for _, section := range s.Sections {
		if !section.Custom() {
			out = meter.AppendSection(out, section.ID, section.Body)
		}
	}
	names := s.FunctionNames()
	if names == nil {
		return out
	}
	list := binary.AppendUvarint(nil, uint64(len(names)))
	for _, f := range names {
		text := meter.Printable(string(f.Text), meter.MaxShown)
		list = binary.AppendUvarint(list, uint64(f.Index))
		list = append(binary.AppendUvarint(list, uint64(len(text))), text...)
	}
	const custom, functionNames = 0, 1 // ids of a section and of a part of it
	return meter.AppendSection(out, custom, []byte("\x04name"), meter.AppendSection(nil, functionNames, list))
}
