package server

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/host/kv"
)

// Pins are namespace fields, by their names in the namespace's text, that every session must have.
type Pins map[string]string

// Diff is the first field in which a namespace contradicts the pins, or empty.
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
