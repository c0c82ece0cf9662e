package config

import (
	"strconv"
	"strings"
)

// positions maps each key of a TOML text to its line: "section.name" for keys and tables, "root[1].path" within
// arrays of tables. What is nested in a value has the line of the value's key. The text was parsed before; on one
// that is not TOML the answer is incomplete. (The TOML library gives the lines of what it refuses, but not of what it
// accepts.)
func positions(text string) map[string]int {
	s := scanner{lines: map[string]int{}, last: map[string]int{}}
	for line := range strings.Lines(text) {
		s.number++
		if s.depth == 0 && s.quote == "" {
			line = strings.TrimLeft(line, " \t")
			if strings.HasPrefix(line, "[") {
				s.header(line)
				continue
			}
			line = s.pair(line)
		}
		s.skip(line)
	}
	return s.lines
}

type scanner struct {
	number int
	table  string // that keys belong to
	depth  int    // of open brackets
	quote  string // that ends the open string of several lines
	lines  map[string]int
	last   map[string]int // index of the newest element of an array of tables
}

func (s *scanner) record(path string) {
	if _, ok := s.lines[path]; !ok {
		s.lines[path] = s.number
	}
}

// header reads [table] or [[array]].
func (s *scanner) header(line string) {
	name := strings.TrimLeft(line, "[")
	array := len(line)-len(name) == 2
	parts, _ := keyParts(name)
	s.table = ""
	for i, part := range parts {
		path := join(s.table, part)
		if array && i == len(parts)-1 {
			s.record(path)
			if n, ok := s.last[path]; ok {
				s.last[path] = n + 1
			} else {
				s.last[path] = 0
			}
		}
		if n, ok := s.last[path]; ok {
			path += "[" + strconv.Itoa(n) + "]"
		}
		s.record(path)
		s.table = path
	}
}

// pair records the key of key = value, and returns the value.
func (s *scanner) pair(line string) string {
	parts, rest := keyParts(line)
	value, ok := strings.CutPrefix(rest, "=")
	if !ok {
		return line
	}
	path := s.table
	for _, part := range parts {
		path = join(path, part)
		s.record(path)
	}
	return value
}

// keyParts splits a dotted key, each part bare or quoted, from what follows it.
func keyParts(text string) (parts []string, rest string) {
	for {
		text = strings.TrimLeft(text, " \t")
		if text == "" {
			return parts, ""
		}
		var part string
		if mark := text[:1]; mark == `"` || mark == "'" {
			part, text = cutString(text[1:], mark)
		} else {
			end := strings.IndexAny(text, " \t\r\n.=]#")
			if end < 0 {
				end = len(text)
			}
			part, text = text[:end], text[end:]
		}
		parts = append(parts, part)
		text = strings.TrimLeft(text, " \t")
		var dotted bool
		if text, dotted = strings.CutPrefix(text, "."); !dotted {
			return parts, text
		}
	}
}

// cutString splits at the mark that ends a string. In a basic string a backslash escapes the next character.
func cutString(text, mark string) (inside, rest string) {
	for i := 0; i < len(text); i++ {
		if mark[0] == '"' && text[i] == '\\' {
			i++
		} else if strings.HasPrefix(text[i:], mark) {
			return text[:i], text[i+len(mark):]
		}
	}
	return text, ""
}

// skip follows brackets and strings to the end of a line.
func (s *scanner) skip(line string) {
	for line != "" {
		if mark := s.quote; mark != "" {
			inside, rest := cutString(line, mark)
			if len(inside) == len(line) {
				return // it continues on the next line
			}
			s.quote, line = "", strings.TrimLeft(rest, mark[:1]) // up to two more quotes may belong to the string
			continue
		}
		switch c := line[0]; c {
		case '#':
			return
		case '[', '{':
			s.depth++
		case ']', '}':
			s.depth = max(0, s.depth-1)
		case '"', '\'':
			if triple := strings.Repeat(line[:1], 3); strings.HasPrefix(line, triple) {
				s.quote, line = triple, line[3:]
			} else {
				_, line = cutString(line[1:], line[:1])
			}
			continue
		}
		line = line[1:]
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
