package config

import (
	"strconv"
	"strings"
)

// positions maps each key of a TOML text to its line: "section.name" for keys and tables, "root[1].path" within arrays.
// The text has been parsed already; on one that is not TOML the answer is incomplete, nothing worse. (The TOML library
// knows the lines of what it refuses itself, but does not tell those of what it accepts.)
func positions(text string) map[string]int {
	s := scanner{text: text, line: 1, lines: map[string]int{}, last: map[string]int{}}
	table := ""
	for s.blank(); !s.done(); s.blank() {
		before := s.at
		if s.peek() == '[' {
			table = s.header()
		} else {
			s.pair(table)
		}
		if s.at == before {
			s.next()
		}
	}
	return s.lines
}

type scanner struct {
	text  string
	at    int
	line  int
	depth int
	lines map[string]int
	last  map[string]int // index of the newest element of an array of tables
}

func (s *scanner) done() bool { return s.at >= len(s.text) }

func (s *scanner) peek() byte {
	if s.done() {
		return 0
	}
	return s.text[s.at]
}

func (s *scanner) has(prefix string) bool { return strings.HasPrefix(s.text[s.at:], prefix) }

func (s *scanner) next() {
	if s.done() {
		return
	}
	if s.text[s.at] == '\n' {
		s.line++
	}
	s.at++
}

func (s *scanner) skip(chars string) {
	for !s.done() && strings.IndexByte(chars, s.peek()) >= 0 {
		s.next()
	}
}

// blank skips white space, line breaks and comments.
func (s *scanner) blank() {
	for {
		s.skip(" \t\r\n")
		if s.peek() != '#' {
			return
		}
		for !s.done() && s.peek() != '\n' {
			s.next()
		}
	}
}

func (s *scanner) record(path string) {
	if _, ok := s.lines[path]; !ok {
		s.lines[path] = s.line
	}
}

// header reads [table] or [[array]] and returns the path that its keys stand under.
func (s *scanner) header() string {
	array := s.has("[[")
	s.skip("[")
	parts := s.key()
	s.skip(" \t]")
	path := ""
	for i, part := range parts {
		path = join(path, part)
		if array && i == len(parts)-1 {
			if n, ok := s.last[path]; ok {
				s.last[path] = n + 1
			} else {
				s.last[path] = 0
			}
			s.record(path)
		}
		if n, ok := s.last[path]; ok {
			path += "[" + strconv.Itoa(n) + "]"
		}
		s.record(path)
	}
	return path
}

// pair reads key = value.
func (s *scanner) pair(table string) {
	path := table
	for _, part := range s.key() {
		path = join(path, part)
		s.record(path)
	}
	s.skip(" \t")
	if s.peek() == '=' {
		s.next()
		s.skip(" \t")
		s.value(path)
	}
}

// key reads a dotted key.
func (s *scanner) key() []string {
	var parts []string
	for {
		s.skip(" \t")
		start := s.at
		switch s.peek() {
		case '"', '\'':
			s.quoted()
			parts = append(parts, strings.Trim(s.text[start:s.at], `"'`))
		default:
			for !s.done() && strings.IndexByte(" \t\r\n.=]}#,", s.peek()) < 0 {
				s.next()
			}
			parts = append(parts, s.text[start:s.at])
		}
		s.skip(" \t")
		if s.peek() != '.' {
			return parts
		}
		s.next()
	}
}

// maxDepth bounds the nesting that is followed.
const maxDepth = 64

func (s *scanner) value(path string) {
	if s.depth++; s.depth > maxDepth {
		s.at = len(s.text)
	}
	defer func() { s.depth-- }()
	switch s.peek() {
	case '"', '\'':
		s.quoted()
	case '[':
		s.next()
		for i := 0; ; i++ {
			if s.blank(); s.done() || s.peek() == ']' {
				break
			}
			element := path + "[" + strconv.Itoa(i) + "]"
			s.record(element)
			s.value(element)
			s.blank()
			s.skip(",")
		}
		s.next()
	case '{':
		s.next()
		for {
			if s.blank(); s.done() || s.peek() == '}' {
				break
			}
			before := s.at
			s.pair(path)
			s.blank()
			s.skip(",")
			if s.at == before {
				s.next()
			}
		}
		s.next()
	default:
		start := s.at
		for !s.done() && strings.IndexByte(",]}#\n", s.peek()) < 0 {
			s.next()
		}
		if s.at == start {
			s.next()
		}
	}
}

// quoted skips a string of any of the four kinds.
func (s *scanner) quoted() {
	mark := s.text[s.at : s.at+1]
	if triple := strings.Repeat(mark, 3); s.has(triple) {
		mark = triple
	}
	s.at += len(mark)
	for !s.done() && !s.has(mark) {
		if mark[0] == '"' && s.peek() == '\\' {
			s.next()
		}
		if !s.done() {
			s.next()
		}
	}
	s.at = min(s.at+len(mark), len(s.text))
	if len(mark) == 3 { // up to two more quotes may belong to the string
		s.skip(mark[:1])
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
