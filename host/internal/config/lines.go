package config

import (
	"strconv"
	"strings"
)

// linesOf returns the lines in which tables and keys of TOML text begin, by path: log.level, root[1], root[1].capacity. The
// TOML library does not expose them.
func linesOf(text string) map[string]int {
	found, elements, within := map[string]int{}, map[string]int{}, ""
	var value openValue
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if value != (openValue{}) {
			value.read(line)
			continue
		}
		head, rest, isKey := strings.Cut(line, "=")
		switch name := strings.TrimLeft(line, "["); {
		case line == "" || line[0] == '#':
			continue
		case name != line:
			name, _, _ = strings.Cut(name, "]")
			name = bare.Replace(name)
			array, inner, _ := strings.Cut(name, ".")
			switch n := elements[array]; {
			case strings.HasPrefix(line, "[["):
				within = name + "[" + strconv.Itoa(elements[name]) + "]"
				elements[name]++
			case n > 0:
				within = array + "[" + strconv.Itoa(n-1) + "]." + inner
			default:
				within = name
			}
			found[within] = i + 1
		case isKey:
			found[strings.TrimPrefix(within+"."+bare.Replace(head), ".")] = i + 1
			value.read(rest)
		}
	}
	return found
}

var bare = strings.NewReplacer(" ", "", "\t", "", `"`, "", "'", "")

// openValue is a value that continues on the next line.
type openValue struct {
	text     string // delimiter that ends a multi-line string
	brackets int
}

func (v *openValue) read(line string) {
	for line != "" {
		quoted := line[:1]
		switch {
		case v.text != "":
			_, rest, ended := strings.Cut(line, v.text)
			if line = rest; ended {
				v.text = ""
			}
			continue
		case strings.HasPrefix(line, `"""`), strings.HasPrefix(line, "'''"):
			v.text, line = line[:3], line[3:]
			continue
		case quoted == "#":
			return
		case quoted == `"` || quoted == "'":
			for line = line[1:]; line != "" && line[:1] != quoted; line = line[1:] {
				if quoted == `"` && line[0] == '\\' && len(line) > 1 {
					line = line[1:]
				}
			}
		case strings.Contains("[{", quoted):
			v.brackets++
		case strings.Contains("]}", quoted):
			v.brackets--
		}
		line = strings.TrimPrefix(line, line[:min(1, len(line))])
	}
}
