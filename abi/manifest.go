package abi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
)

// Manifest describes a module without running it. It is the JSON text of the custom section [ManifestSection].
type Manifest struct {
	Name        string            `json:"name"`
	Version     string            `json:"version"`
	ABI         int               `json:"abi"`
	Description string            `json:"description,omitempty"`
	Roles       []string          `json:"roles"`
	Grants      []string          `json:"grants,omitempty"`       // requested grants: clock, metrics, random, wasi-stub
	MemoryPages uint32            `json:"memory_pages,omitempty"` // most pages of 64 KiB that the module needs, for the largest MaxSlots that it supports
	Fuel        *FuelHints        `json:"fuel,omitempty"`
	Counters    []string          `json:"counters,omitempty"` // names of the counters; counter_add takes an index into this list
	Config      map[string]Option `json:"config,omitempty"`   // keys that the policy reads; other keys are refused
	StateFormat string            `json:"state_format,omitempty"`
	// VictimsAhead is the number of victims that may be named before they are needed. It is for policies that order entries by
	// last touch: the entries named first are then still the right ones after others have been touched. With 0 the policy is
	// asked each time.
	VictimsAhead uint32 `json:"victims_ahead,omitempty"`
	MinHost      string `json:"min_host,omitempty"`
}

// FuelHints are a module's expected costs. The operator's limits take precedence.
type FuelHints struct {
	Call   uint64 `json:"call"`   // per call
	Record uint64 `json:"record"` // per record of a batch
}

// Option describes one configuration key.
type Option struct {
	Type    string `json:"type"` // int, float, bool, string
	Default string `json:"default,omitempty"`
	Unit    string `json:"unit,omitempty"`
	Help    string `json:"help,omitempty"`
}

// Grants that a module can request. A grant is given if the manifest requests it and the configuration allows it.
const (
	GrantClock    = "clock"
	GrantMetrics  = "metrics"
	GrantRandom   = "random"
	GrantWASIStub = "wasi-stub"
)

// ParseManifest parses a manifest strictly. Unknown fields, roles and grants, another ABI, and text that two readers
// could interpret differently are errors.
func ParseManifest(text []byte) (Manifest, error) {
	var m Manifest
	if len(text) > MaxManifestBytes {
		return Manifest{}, fmt.Errorf("abi: manifest: %d bytes, at most %d", len(text), MaxManifestBytes)
	}
	if err := unambiguous(text); err != nil {
		return Manifest{}, fmt.Errorf("abi: manifest: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return Manifest{}, fmt.Errorf("abi: manifest: %w", err)
	}
	if d.More() {
		return Manifest{}, fmt.Errorf("abi: manifest: text after the object")
	}
	return m, m.Validate()
}

// Validate checks everything that does not need the module.
func (m Manifest) Validate() error {
	if m.Name == "" {
		return fmt.Errorf("abi: manifest: no name")
	}
	if err := m.validateWords(); err != nil {
		return err
	}
	if m.ABI != Version {
		return fmt.Errorf("abi: manifest: %s is made for ABI %d, this host speaks %d", m.Name, m.ABI, Version)
	}
	if len(m.Roles) == 0 {
		return fmt.Errorf("abi: manifest: %s names no roles", m.Name)
	}
	for i, r := range m.Roles {
		if _, err := ParseRole(r); err != nil {
			return fmt.Errorf("abi: manifest: %s: %w", m.Name, err)
		}
		if slices.Contains(m.Roles[:i], r) {
			return fmt.Errorf("abi: manifest: %s names role %s twice", m.Name, r)
		}
	}
	for _, g := range m.Grants {
		switch g {
		case GrantClock, GrantMetrics, GrantRandom, GrantWASIStub:
		default:
			return fmt.Errorf("abi: manifest: %s wants unknown grant %q (clock, metrics, random, wasi-stub)", m.Name, g)
		}
	}
	if m.MemoryPages > MaxMemoryPages {
		return fmt.Errorf("abi: manifest: %s: memory_pages %d, at most %d", m.Name, m.MemoryPages, MaxMemoryPages)
	}
	if m.VictimsAhead > MaxVictimsAhead {
		return fmt.Errorf("abi: manifest: %s: victims_ahead %d, at most %d", m.Name, m.VictimsAhead, MaxVictimsAhead)
	}
	if m.VictimsAhead > 0 && !slices.Contains(m.Roles, RoleEvict.String()) {
		return fmt.Errorf("abi: manifest: %s: victims_ahead is for the role evict", m.Name)
	}
	if m.MinHost != "" {
		if _, err := release(m.MinHost); err != nil {
			return err
		}
	}
	for key, o := range m.Config {
		if err := o.validate(key); err != nil {
			return fmt.Errorf("abi: manifest: %s: %w", m.Name, err)
		}
	}
	return nil
}

// MaxMemoryPages is the maximum size of a 32-bit memory: 4 GiB.
const MaxMemoryPages = 65536

// MaxVictimsAhead is the maximum of [Manifest].VictimsAhead.
const MaxVictimsAhead = 256

func (o Option) validate(key string) error {
	switch o.Type {
	case "int", "float", "bool", "string":
	default:
		return fmt.Errorf("config %s has unknown type %q (int, float, bool, string)", key, o.Type)
	}
	if o.Default != "" && !o.Accepts(o.Default) {
		return fmt.Errorf("default %q of %s is not of type %s", o.Default, key, o.Type)
	}
	return nil
}

// Accepts reports whether text is a value of the option's type.
func (o Option) Accepts(text string) bool {
	var err error
	switch o.Type {
	case "int":
		_, err = strconv.ParseInt(text, 10, 64)
	case "float":
		_, err = strconv.ParseFloat(text, 64)
	case "bool":
		_, err = strconv.ParseBool(text)
	}
	return err == nil
}
