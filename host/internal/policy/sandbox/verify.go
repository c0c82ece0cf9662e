package sandbox

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/meter"
)

// exportTypes are the functions that a module may or must export. "i" is i32, "I" is i64.
var exportTypes = map[string]string{
	abi.ExportMarker:     ">",
	abi.ExportInitialize: ">",
	abi.ExportBuffer:     "ii>i",
	abi.ExportInit:       "i>i",
	abi.ExportNamespace:  "ii>i",
	abi.ExportEvents:     "ii>i",
	abi.ExportStep:       "ii>I",
	abi.ExportAdmit:      "ii>I",
	abi.ExportPlace:      "ii>I",
	abi.ExportLayout:     "ii>I",
	abi.ExportSave:       "i>I",
	abi.ExportLoad:       "i>i",
}

// reactorHint is the remedy for a module that is a program.
const reactorHint = "it is a command, not a library: build it with -buildmode=c-shared (Go, TinyGo), " +
	"-mexec-model=reactor (clang) or crate-type cdylib (Rust)"

// Verify checks the module against the contract and returns its roles.
func (s *Scan) Verify() ([abi.Roles]bool, error) {
	var roles [abi.Roles]bool
	if _, ok := s.Exports[abi.ExportMarker]; !ok {
		return roles, s.noMarker()
	}
	_, start := s.Exports["_start"]
	_, initialize := s.Exports[abi.ExportInitialize]
	if start && !initialize {
		return roles, fmt.Errorf("it exports _start and not %s: %s", abi.ExportInitialize, reactorHint)
	}
	if m, ok := s.Exports[abi.ExportMemory]; !ok || m.Kind != meter.KindMemory || s.Memories != 1 {
		return roles, fmt.Errorf("it must have one memory, exported as %q", abi.ExportMemory)
	}
	for _, name := range []string{abi.ExportBuffer, abi.ExportInit} {
		if _, ok := s.Exports[name]; !ok {
			return roles, fmt.Errorf("it does not export %s", name)
		}
	}
	for name, want := range exportTypes {
		if e, ok := s.Exports[name]; ok && s.Signature(e) != want {
			return roles, fmt.Errorf("its %s is %s, want %s", name, spell(s.Signature(e)), spell(want))
		}
	}
	return s.roles()
}

func (s *Scan) noMarker() error {
	for name := range s.Exports {
		if v, ok := strings.CutPrefix(name, "kvhost_abi_"); ok {
			return fmt.Errorf("it is made for ABI %s, this host speaks %d", meter.Printable(v, meter.MaxShown), abi.Version)
		}
	}
	if _, ok := s.Exports["_start"]; ok {
		return fmt.Errorf("it exports _start and no %s: %s", abi.ExportMarker, reactorHint)
	}
	return fmt.Errorf("it does not export %s: it is not a kvhost policy (see abi/SPEC.md)", abi.ExportMarker)
}

func (s *Scan) roles() ([abi.Roles]bool, error) {
	var roles [abi.Roles]bool
	for r := range abi.Roles {
		var missing []string
		for _, name := range r.Exports() {
			if _, ok := s.Exports[name]; !ok {
				missing = append(missing, name)
			}
		}
		roles[r] = len(missing) == 0
		if !roles[r] && len(missing) < len(r.Exports()) {
			return roles, fmt.Errorf("role %s needs %s; %s is missing", r, strings.Join(r.Exports(), " and "), missing[0])
		}
	}
	if !slices.Contains(roles[:], true) {
		return roles, errors.New("it exports the functions of no role (evict, admit, place, layout)")
	}
	_, save := s.Exports[abi.ExportSave]
	_, load := s.Exports[abi.ExportLoad]
	if save != load {
		return roles, fmt.Errorf("it exports only one of %s and %s", abi.ExportSave, abi.ExportLoad)
	}
	return roles, nil
}

// CheckGrants checks that each import is known, has the right type, and was requested and allowed.
func (s *Scan) CheckGrants(manifest abi.Manifest, allowed []string) error {
	for _, i := range s.Imports {
		f, ok := hostFunctions[i.Module][i.Name]
		if !ok {
			return fmt.Errorf("it imports %s.%s, which this host does not have", meter.Printable(i.Module, meter.MaxShown),
				meter.Printable(i.Name, meter.MaxShown))
		}
		if f.grant != "" {
			if !slices.Contains(manifest.Grants, f.grant) {
				return fmt.Errorf("%w: it imports %s.%s, which needs the grant %q; its manifest (custom section %s) does not ask "+
					"for it",
					ErrGrant, i.Module, i.Name, f.grant, abi.ManifestSection)
			}
			if f.grant != abi.GrantWASIStub && !slices.Contains(allowed, f.grant) {
				return fmt.Errorf("%w: it imports %s.%s, which needs the grant %q; add it to the policy's grants in the "+
					"configuration",
					ErrGrant, i.Module, i.Name, f.grant)
			}
		}
		if i.Sig != f.sig() {
			return fmt.Errorf("it imports %s.%s as %s, it is %s", i.Module, i.Name, spell(i.Sig), spell(f.sig()))
		}
	}
	return nil
}

// spell turns "ii>I" into "(i32, i32) -> i64".
func spell(sig string) string {
	if sig == "" {
		return "not a function"
	}
	names := map[rune]string{'i': "i32", 'I': "i64", 'f': "f32", 'F': "f64", 'v': "v128", 'r': "funcref", 'x': "externref"}
	params, results, _ := strings.Cut(sig, ">")
	list := func(s string) string {
		var out []string
		for _, c := range s {
			out = append(out, names[c])
		}
		return strings.Join(out, ", ")
	}
	text := "(" + list(params) + ")"
	if results != "" {
		text += " -> " + list(results)
	}
	return meter.Printable(text, meter.MaxShown)
}
