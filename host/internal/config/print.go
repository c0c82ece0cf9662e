package config

import (
	"bufio"
	"bytes"
	_ "embed" // arrays.toml
	"fmt"
	"io"
	"strings"

	"github.com/BurntSushi/toml"
)

// Print writes the effective configuration as TOML, with the origin of each value as a comment. The output can be read
// back.
func (l *Loaded) Print(w io.Writer) error {
	b := bufio.NewWriter(w)
	section := ""
	for _, k := range keys {
		if k.Section != section {
			section = k.Section
			fmt.Fprintf(b, "%s\n", l.heading(section))
		}
		fmt.Fprintf(b, "%s = %s # %s\n", k.Name, k.toml(&l.Config), l.Origins[k.Path()])
	}
	l.printPins(b)
	for _, t := range tables {
		t.print(b, l)
	}
	return b.Flush()
}

// heading is a section's first line. A section in which nothing was set leaves nothing behind where lines with "# default" are
// cut: no empty line is before it.
func (l *Loaded) heading(section string) string {
	for _, k := range keys {
		if k.Section == section && l.Origins[k.Path()].From != FromDefault {
			return "\n[" + section + "]"
		}
	}
	return "[" + section + "] # default"
}

// JSON is what Print writes, and the origins by the values' paths.
func (l *Loaded) JSON() (any, error) {
	var text bytes.Buffer
	var values map[string]any
	if err := l.Print(&text); err != nil {
		return nil, err
	}
	_, err := toml.Decode(text.String(), &values)
	origins := map[string]string{}
	for path, o := range l.Origins {
		origins[path] = o.String()
	}
	return map[string]any{"config": values, "origins": origins}, err
}

const exampleHead = `# kvhost configuration: every key with its default. Without a line, its default holds.
#
# The environment overrides this file (KVHOST_LOG_LEVEL=debug sets level in [log]), and flags override both
# (--log-level debug). KVHOST_POLICY and KVHOST_ROOT are comma-separated lists.
# Sizes: bytes, or text with a unit: K, KiB, M, MiB and so on up to P (1024), or KB, MB, GB, TB, PB (1000). Durations: "250ms", "1h30m".
# ` + "`kvhost config`" + ` prints the effective configuration and where each value comes from.
# ` + "`kvhost config --defaults`" + ` prints this file.
`

// exampleArrays is the part of the example with the array tables.
//
//go:embed arrays.toml
var exampleArrays string

// Example writes the commented file of all keys with their defaults.
func Example(w io.Writer) error {
	b := bufio.NewWriter(w)
	b.WriteString(exampleHead)
	c := Default()
	section := ""
	for _, k := range keys {
		if k.Section != section {
			section = k.Section
			fmt.Fprintf(b, "\n[%s]", section)
		}
		b.WriteByte('\n')
		for _, line := range Wrap(k.Help, 118) {
			fmt.Fprintf(b, "# %s\n", line)
		}
		fmt.Fprintf(b, "# %sDefault: %s.\n%s = %s\n", k.unit(), k.toml(c), k.Name, k.toml(c))
	}
	b.WriteString(examplePins)
	b.WriteString(exampleArrays)
	return b.Flush()
}

// unit describes the value: choices, unit and range.
func (k *Key) unit() string {
	unit := k.Unit
	switch k.Kind {
	case Choice:
		return "One of: " + strings.Join(k.Choices, ", ") + ". "
	case Size:
		unit = strings.TrimSuffix("bytes, "+k.Unit, ", ")
	case Duration:
		unit = "a duration"
	case Ratio:
		unit = "0 to 1 " + k.Unit
	}
	if unit == "" {
		return ""
	}
	return "Unit: " + unit + ". "
}

// Usage is the help of the key's flag.
func (k *Key) Usage() string { return strings.TrimSpace(k.Help + " " + k.unit()) }

// Wrap breaks a text into lines of at most so many bytes.
func Wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
