package server

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/host/kv"
)

// Pins are namespace fields that every session must match. The keys are the field names in the namespace's text form.
type Pins map[string]string

// Diff describes the first field in which a namespace differs from the pins. It is empty if there is none.
func (p Pins) Diff(ns *kv.Namespace) string {
	if len(p) == 0 {
		return ""
	}
	have := map[string]string{}
	for line := range strings.Lines(ns.Text()) {
		k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		have[k] = v
	}
	for _, k := range slices.Sorted(maps.Keys(p)) {
		if have[k] != p[k] {
			return fmt.Sprintf("%s: %q, the operator pinned %q", k, have[k], p[k])
		}
	}
	return ""
}
