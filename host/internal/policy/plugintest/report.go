package plugintest

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Options of a check. The zero value is valid.
type Options struct {
	Grants []string       // grants of the operator; nil: all that the manifest requests
	Config policy.Config  // settings
	Fuel   sandbox.Fuel   // fuel of the configuration; zero: the defaults
	Slots  uint32         // slots of the largest instance; 0: 1,048,576
	Seed   uint64         // seed of the random streams
	Cache  *sandbox.Cache // cache of compiled code; optional
	// Profile adds the fuel of the module's functions to the report.
	Profile bool
	rounds  int // rounds of each random stream; 0: 1,500
}

const defaultSlots = 1 << 20

// Report is the result of a check.
type Report struct {
	Path     string
	Name     string // name in the manifest
	Digest   string // SHA-256 of the module
	Roles    []abi.Role
	Findings []Finding              // one of each kind and place; empty if the module conforms
	Calls    []Usage                // the most expensive call of each export, with its fuel
	Memory   uint64                 // bytes of the largest instance's memory at its end
	Slots    uint32                 // slots of that instance
	Profile  []sandbox.FunctionFuel `json:",omitempty"`
}

// Finding is a defect of a module.
type Finding struct {
	Role  string // empty if the defect is not of one role
	Where string // export, section or file
	What  string
	Do    string // remedy for the author
}

func (f *Finding) Error() string {
	role := ""
	if f.Role != "" {
		role = f.Role + ": "
	}
	return fmt.Sprintf("%s%s: %s: %s", role, f.Where, f.What, f.Do)
}

// Usage is a call and its fuel.
type Usage struct {
	Export        string
	Records       int
	Used, Allowed uint64
}

// Share returns the used part of the fuel.
func (u Usage) Share() float64 { return float64(u.Used) / float64(max(1, u.Allowed)) }

// add records the result of a check, unless the same was found in the same place before.
func (r *Report) add(err error) {
	if err == nil {
		return
	}
	f, ok := errors.AsType[*Finding](err)
	if !ok {
		f = &Finding{Where: "check", What: err.Error(), Do: "the check could not continue"}
	}
	f.What = strings.Join(strings.Fields(f.What), " ")
	if !slices.ContainsFunc(r.Findings, func(o Finding) bool { return o.Role == f.Role && o.Where == f.Where && o.Do == f.Do }) {
		r.Findings = append(r.Findings, *f) // the first finding of its kind
	}
}

// spend records the most expensive call of each export.
func (r *Report) spend(export string, records int, used, allowed uint64) {
	u := Usage{export, records, used, allowed}
	i := slices.IndexFunc(r.Calls, func(o Usage) bool { return o.Export == export })
	switch {
	case i < 0:
		r.Calls = append(r.Calls, u)
		slices.SortFunc(r.Calls, func(a, b Usage) int { return cmp.Compare(a.Export, b.Export) })
	case u.Share() > r.Calls[i].Share():
		r.Calls[i] = u
	}
}
