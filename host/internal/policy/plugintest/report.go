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
	Grants []string       // that the operator would allow; nil for all that the manifest requests
	Config policy.Config  // settings
	Fuel   sandbox.Fuel   // as in the configuration; zero for the defaults
	Slots  uint32         // of the largest instance that is tried; 0 for 1,048,576
	Seed   uint64         // of the random streams; the same seed gives the same streams
	Cache  *sandbox.Cache // of compiled code; optional
	// Profile is whether to tell what the module's functions use.
	Profile bool
	rounds  int // of each random stream; 0 for 1,500
}

const defaultSlots = 1 << 20

// Report is what a check found.
type Report struct {
	Path     string
	Name     string // the manifest's
	Digest   string // SHA-256 of the module
	Roles    []abi.Role
	Findings []Finding              // none when the module conforms; one of each kind and place
	Calls    []Usage                // the most expensive call of each export, with its fuel
	Memory   uint64                 // bytes of the largest instance's memory at its end
	Slots    uint32                 // it was made for
	Profile  []sandbox.FunctionFuel `json:",omitempty"`
}

// Finding is a defect of a module.
type Finding struct {
	Role  string // empty when it is not of one role
	Where string // export, section or file
	What  string
	Do    string // what its author should do
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

// Share is the part of the fuel that was used.
func (u Usage) Share() float64 { return float64(u.Used) / float64(max(1, u.Allowed)) }

// add records the result of a check, unless the same was found in the same place before.
func (r *Report) add(err error) {
	if err == nil {
		return
	}
	var f *Finding
	if !errors.As(err, &f) {
		f = &Finding{Where: "check", What: err.Error(), Do: "the check could not continue"}
	}
	f.What = strings.Join(strings.Fields(f.What), " ")
	if !slices.ContainsFunc(r.Findings, func(o Finding) bool {
		return o.Role == f.Role && o.Where == f.Where &&
			o.Do == f.Do
	}) {
		r.Findings = append(r.Findings, *f) // the first of its kind
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
