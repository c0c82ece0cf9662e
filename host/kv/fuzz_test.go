package kv

import (
	"regexp"
	"strings"
	"testing"
)

// FuzzPattern compares patterns with regular expressions.
func FuzzPattern(f *testing.F) {
	f.Add("meta-llama/*", "model=meta-llama/a\n")
	f.Add("dtype=fp?*", "model=m\ndtype=fp8\n")
	f.Add("**a*b", "model=aabab")
	f.Fuzz(func(t *testing.T, pattern, text string) {
		p, err := ParsePattern(pattern)
		if err != nil {
			return
		}
		got := p.Matches(text)
		if strings.ContainsFunc(pattern+text, func(r rune) bool { return r >= 0x80 }) {
			return // ? is a byte of a pattern, and a character of an expression
		}
		same := regexp.MustCompile("^(?:" + strings.NewReplacer(`\*`, `(?s:.*)`, `\?`, `(?s:.)`).Replace(regexp.QuoteMeta(p.glob)) + ")$")
		want := false
		for line := range strings.Lines(text) {
			k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			want = want || k == p.field && same.MatchString(v)
		}
		if got != want {
			t.Fatalf("%q on %q: %v", pattern, text, got)
		}
	})
}
