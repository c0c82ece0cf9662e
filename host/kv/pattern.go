package kv

import (
	"fmt"
	"strings"
)

// Pattern says which namespaces something is for. It is "GLOB", which is compared with the model, or "FIELD=GLOB", with any
// line of the namespace's text: "meta-llama/*", "dtype=fp8*". In a glob, * stands for any bytes, also none and also
// slashes, and ? for one.
type Pattern struct{ field, glob string }

// ParsePattern reads a pattern.
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

// ParsePatterns reads patterns.
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

// Matches says whether a namespace of this text is meant.
func (p Pattern) Matches(text string) bool {
	v, ok := field(text, p.field)
	return ok && glob(p.glob, v)
}

// Field is the value of a line of a namespace's text, and empty if there is none.
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

// glob compares in one pass: after a mismatch, only the last star can take one byte more.
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
