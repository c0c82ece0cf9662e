package config

import (
	"bufio"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// pinsPath is the path of the table of namespace fields that the operator pins.
const pinsPath = "session.pins"

// pinFields are the fields of a namespace's text, in addition to group.NUMBER and extra.NAME.
var pinFields = []string{
	"model", "revision", "dtype", "engine", "hash_algorithm", "hash_seed", "key_bytes", "tokens_per_block",
	"tensor_parallel",
	"pipeline_stages", "context_parallel", "replicated", "units",
}

var pinGroup = regexp.MustCompile(`^group\.(0|[1-9][0-9]*)$`)

func (r *fileReader) pins(value any) {
	pins, err := asSettings(pinsPath, value)
	if err != nil {
		r.fail(pinsPath, err)
		return
	}
	r.into.Config.Session.Pins = pins
	for name := range pins {
		r.into.Origins[pinsPath+"."+name] = r.origin(pinsPath + "." + name)
	}
}

func (c *Config) validatePins(bad func(wrong bool, path, format string, args ...any)) {
	for _, name := range sorted(c.Session.Pins) {
		extra, isExtra := strings.CutPrefix(name, "extra.")
		if isExtra && extra != "" || slices.Contains(pinFields, name) || pinGroup.MatchString(name) {
			continue
		}
		bad(true, pinsPath+"."+name, "a namespace has no field %q%s", name, Suggest(name, pinFields))
	}
}

func (l *Loaded) printPins(b *bufio.Writer) {
	pins := l.Config.Session.Pins
	if len(pins) == 0 {
		return
	}
	fmt.Fprintf(b, "\n[%s]\n", pinsPath)
	for _, name := range sorted(pins) {
		fmt.Fprintf(b, "%s = %s # %s\n", quote(name), quote(pins[name]), l.Origins[pinsPath+"."+name])
	}
}
