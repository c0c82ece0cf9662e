package config

import (
	"bufio"
	"bytes"
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
		fmt.Fprintf(b, "%s = %s # %s\n", k.Name, k.toml(k.field(&l.Config)), l.Origins[k.Path()])
	}
	l.printPins(b)
	for _, a := range arrays {
		list := a.list(&l.Config)
		for i := range list.Len() {
			fmt.Fprintf(b, "\n[[%s]] # %s\n", a.name, l.Origins[a.at(i)])
			for _, k := range a.keys {
				if text := k.toml(list.Index(i).FieldByIndex(k.index)); text != "" {
					fmt.Fprintf(b, "%s = %s # %s\n", k.Name, text, l.Origins[a.at(i)+"."+k.Name])
				}
			}
		}
	}
	return b.Flush()
}

// heading returns the first lines of a section. If nothing in the section was set, there is no empty line before it, so that
// deleting the lines with "# default" leaves nothing behind.
func (l *Loaded) heading(section string) string {
	for _, k := range keys {
		if k.Section == section && l.Origins[k.Path()].From != FromDefault {
			return "\n[" + section + "]"
		}
	}
	return "[" + section + "] # default"
}

// JSON returns the same content as Print, and the origins by the paths of the values.
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

// Example writes the commented file of all keys with their defaults.
func Example(w io.Writer) error {
	_, err := io.WriteString(w, example)
	return err
}

// Wrap breaks a text into lines of at most width bytes.
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
