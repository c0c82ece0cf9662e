package kv

import (
	"fmt"
	"strings"
)

// Pattern matches namespaces. It is "GLOB", which is compared with the model, or "FIELD=GLOB", which is compared with a line of
// the namespace's text: "meta-llama/*", "dtype=fp8*". In a glob, * matches any bytes, including none and slashes, and ? matches
// one byte.
type Pattern struct{ field, glob string }

// ParsePattern parses a pattern.
func ParsePattern(text string) (Pattern, error) {
	field, glob, given := strings.Cut(text, "=")
	if !given {
		field, glob = "model", text
	}
	if field == "" || glob == "" || strings.ContainsAny(text, "\n\r\x00") {
		return Pattern{}, fmt.Errorf("%w: pattern %q: want a glob over the model, or FIELD=GLOB", ErrNamespace, text)
	}
	return Pattern{field, glob}, nil
}

// ParsePatterns parses a list of patterns.
func ParsePatterns(texts []string) (list []Pattern, err error) {
	for _, text := range texts {
		p, err := ParsePattern(text)
		if err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	return list, nil
}

// Matches reports whether the pattern matches a namespace, given its text.
func (p Pattern) Matches(text string) bool {
	v, ok := field(text, p.field)
	return ok && glob(p.glob, v)
}

// Field returns the value of a line of a namespace's text. It is empty if there is no such line.
func Field(text, name string) string {
	v, _ := field(text, name)
	return v
}

func field(text, name string) (value string, ok bool) {
	for line := range strings.Lines(text) {
		if k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "="); k == name {
			return v, true
		}
	}
	return "", false
}

// glob compares in one pass: after a mismatch, it lets the last star match one more byte.
func glob(pattern, text string) bool {
	p, t, star, from := 0, 0, -1, 0
	for t < len(text) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, t
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == text[t]):
			p++
			t++
		case star >= 0:
			from++
			p, t = star+1, from
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}
